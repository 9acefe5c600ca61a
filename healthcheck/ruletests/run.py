"""One rule-test file at work: its rules, what in it does not fit them, and its tests with their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from healthcheck.core.alerts import State
from healthcheck.core.errors import Problem, RuleFileError
from healthcheck.core.text import suggest
from healthcheck.extend.registry import Registry
from healthcheck.rulelang.document import Document, KeyPath
from healthcheck.rulelang.rule import Cause, RuleSet, Selector, Span, named
from healthcheck.ruletests.compare import Difference, compare
from healthcheck.ruletests.loading import RuleTest, RuleTestFile, Source, load_tests
from healthcheck.ruletests.play import EVAL_PREFIXES, Played, RecordError, play, series_of
from healthcheck.ruletests.report import failure_text

LoadRules = Callable[..., RuleSet]
"""``load(rules=[...], profile=, only=, off=, set=)``: the assembly's, with its plugin host bound."""


@dataclass(frozen=True, slots=True)
class Result:
    """How one test ended. ``text`` is empty when it passed."""

    text: str
    differences: tuple[Difference, ...]
    fired: tuple[str, ...]
    """Causes (``rule.cause``) that had an episode."""
    silent: tuple[str, ...]
    """Causes that were judged and had none."""

    @property
    def passed(self) -> bool:
        """Whether nothing came out otherwise than expected."""
        return not self.differences


class RuleTestBook:
    """One ``*.hctest.yaml`` with the rules that it names.

    :param load: compiles rules; called anew for each engine.
    :param registry: what plugins and built-ins registered: metrics and actions.
    :param shown: how the file is called in messages.

    Raises ``RuleFileError`` with all mistakes of the test file and of its rule files.
    """

    def __init__(self, path: Path, load: LoadRules, registry: Registry, *, shown: str = "") -> None:
        self.file, problems = load_tests(path, shown=shown)
        self._load = load
        self._stages = {name: action.stage for name, action in registry.actions.items()}
        self._base: dict[str, RuleSet] = {}
        self._compiled: dict[tuple[Any, ...], RuleSet] = {}
        broken = self._load_base() if self.file.rules else []
        if not broken:
            problems += problems_with(self.file, self._base, registry)
        if problems or broken:
            raise RuleFileError([*sorted(problems, key=lambda p: (p.line, p.column)), *broken])

    def _load_base(self) -> list[Problem]:
        """The rules under each profile that a test names; returns what is wrong with them."""
        for profile in dict.fromkeys(test.profile for test in self.file.tests):
            try:
                self._base[profile] = self._load(rules=list(self.file.rules), profile=profile or None)
            except RuleFileError as error:
                return list(error.problems)
        return []

    @property
    def tests(self) -> list[RuleTest]:
        """In the order of the file."""
        return self.file.tests

    def rules_of(self, test: RuleTest) -> RuleSet:
        """A rule set of its own for one engine of this test: derived metrics keep state in it."""
        given = (test.profile, test.only, test.off, test.warmup, json.dumps(test.settings, sort_keys=True))
        if given not in self._compiled:
            rules = self._load(
                rules=list(self.file.rules),
                profile=test.profile or None,
                only=list(test.only),
                off=list(test.off),
                set=[f"{path}={json.dumps(value)}" for path, value in test.settings.items()],
            )
            if test.warmup is not None:
                steps = test.warmup
                rules.rules = [
                    replace(rule, causes=tuple(_warmed(cause, steps) for cause in rule.causes)) for rule in rules.rules
                ]
            self._compiled[given] = rules
        compiled = self._compiled[given]
        return replace(compiled, rules=list(compiled.rules), derived=deepcopy(compiled.derived))

    def run(self, test: RuleTest) -> Result:
        """Play one test and compare.

        Raises ``RuleFileError`` where ``set`` or a record cannot be used.
        """
        try:
            played = play(test, self.rules_of, self._stages)
        except RecordError as error:
            problem = self.file.document.problem(error.source.where, "record", str(error))
            raise RuleFileError([problem]) from None
        found = compare(test, played)
        text = failure_text(test, played, found, lambda: self.rules_of(test), self.file.path.parent) if found else ""
        fired = tuple(
            dict.fromkeys(
                f"{episode.alert.rule}.{finding.cause}" if finding.cause else episode.alert.rule
                for episode in played.episodes
                for finding in episode.alert.findings
            )
        )
        return Result(text, tuple(found), fired, tuple(_silent(played, fired)))

    @property
    def rules_name(self) -> str:
        """What the tested rules are called: two test files over the same rules share their coverage."""
        return " + ".join("rules in place" if isinstance(entry, dict) else str(entry) for entry in self.file.rules)

    def own_rules(self) -> list[str]:
        """Causes (``rule.cause``) of the rules that the named files write or change, packs that they extend left out."""
        named = {str(entry) for entry in self.file.rules if not isinstance(entry, dict)}
        names = named | {Path(entry).name for entry in named}
        found: dict[str, None] = {}
        for rules in self._base.values():
            for rule in rules.causes:
                if any(place in names or Path(place).name in names for place in _places(rule)) or len(names) < len(
                    self.file.rules
                ):
                    found[rule.id] = None
        return list(found)


def _places(rule: Cause) -> Iterable[str]:
    return {rule.origin.path, *(origin.path for origin in rule.key_origins.values())}


def _warmed(rule: Cause, steps: int) -> Cause:
    """The rule with the warm-up of the test, as ``defaults: {warmup: ...}`` would give it."""
    exempt = rule.condition.judges_nonfinite or rule.condition.absence
    return rule if exempt and not rule.warmup.amount else replace(rule, warmup=Span(steps))


def _silent(played: Played, fired: tuple[str, ...]) -> Iterable[str]:
    """Rules that some series brought as far as a judgement, and that never fired."""
    judged = (State.OK, State.PENDING, State.FIRING)
    for rule in played.rules.causes:
        states = [e.by_id[rule.id] for e in played.engines.values() if rule.id in e.by_id]
        if rule.id not in fired and any(
            s is not None and s.state in judged for st in states for s in st.series.values()
        ):
            yield rule.id


# --------------------------------------------------------------------------- mistakes that only show beside the rules


def problems_with(file: RuleTestFile, rules: Mapping[str, RuleSet], registry: Registry) -> list[Problem]:
    """All of them, in the order of the file.

    :param rules: profile -> the rules under it, nothing switched off.
    """
    found: list[Problem] = []
    for test in file.tests:
        if test.profile in rules:
            found += _Checker(file.document, test, rules[test.profile], registry).problems()
    return found


class _Checker:
    def __init__(self, document: Document, test: RuleTest, rules: RuleSet, registry: Registry) -> None:
        self.document = document
        self.test = test
        self.rules = rules
        self.registry = registry
        self.ids = [*dict.fromkeys([*(r.id for r in rules.causes), *(r.id for r in rules.rules), *rules.off])]
        self.active = [rule for rule in rules.causes if self._plays(rule.id)]
        self.inputs = {derived.name: derived.inputs for derived in rules.derived}

    def problems(self) -> Iterator[Problem]:
        yield from self._ids()
        yield from self._actions()
        if self._sources() and all(
            source.series for source in self._sources()
        ):  # a whole record says itself what it has
            unknown = list(self._unknown_series())
            yield from unknown or self._unfed()

    def _sources(self) -> list[Source]:
        return [source for sources in self.test.ranks.values() for source in sources]

    def _plays(self, rule: str) -> bool:
        names = [cause.id for cause in self.rules.causes if rule in (cause.id, cause.rule)] or [rule]
        chosen = [n for n in names if not self.test.only or any(named(word, n) for word in self.test.only)]
        return any(not any(named(word, n) for word in self.test.off) for n in chosen)

    def _problem(self, where: KeyPath, slug: str, message: str, suggestion: str = "", *, key: bool = False) -> Problem:
        return self.document.problem(where, slug, message, suggestion=suggestion, key=key)

    # -- ids --------------------------------------------------------------------------

    def _ids(self) -> Iterator[Problem]:
        where = self.test.where
        for key, words in (("only", self.test.only), ("off", self.test.off)):
            for index, word in enumerate(words):
                if not any(named(word, rule) for rule in self.ids):
                    yield self._unknown_rule((*where, key, index), word)
        for entry in self.test.expect:
            if entry.rule not in self.ids:
                yield self._unknown_rule((*entry.where, "rule"), entry.rule)
            elif entry.rule in self.rules.off and entry.rule not in self.test.only:
                yield self._problem(
                    (*entry.where, "rule"), "rule-off", f'"{entry.rule}" is switched off in its rule file'
                )
            elif not self._plays(entry.rule):
                yield self._problem(
                    (*entry.where, "rule"), "rule-off", f'"{entry.rule}" is not used in this test (only, off)'
                )
            if entry.rank is not None and entry.rank not in self.test.ranks:
                ranks = ", ".join(map(str, self.test.ranks))
                yield self._problem(
                    (*entry.where, "rank"), "value", f"this test has no rank {entry.rank}; it has {ranks}"
                )

    def _unknown_rule(self, where: KeyPath, word: str) -> Problem:
        return self._problem(where, "unknown-rule", f'"{word}" is not a rule of these files', suggest(word, self.ids))

    def _actions(self) -> Iterator[Problem]:
        for entry in self.test.expect:
            for index, name in enumerate(entry.then or ()):
                if name not in self.registry.actions:
                    hint = suggest(name, self.registry.actions)
                    yield self._problem(
                        (*entry.where, "then", index), "unknown-action", f'"{name}" is not an action', hint
                    )

    # -- series -----------------------------------------------------------------------

    def _unknown_series(self) -> Iterator[Problem]:
        """A misspelt series would feed nobody, and `expect: none` would pass for the wrong reason."""
        known = {m.name for m in self.registry.metrics.values()} | set(self.rules.external)
        known |= {name for rule in self.rules.causes for name in _watched(rule)}
        known |= {name for inputs in self.inputs.values() for name in inputs}
        for source in self._sources():
            name = series_of(source.series)[0]
            if name not in known:
                text = f'no rule, probe or `external:` knows a metric "{name}"'
                yield self._problem(source.where, "unknown-metric", text, suggest(name, known), key=True)

    def _unfed(self) -> Iterator[Problem]:
        """A test whose series reach no rule tests nothing: missing data is not a pass."""
        where = (*self.test.where, "ranks" if len(self.test.ranks) > 1 else "series")
        if self.test.only:
            for index, word in enumerate(self.test.only):
                meant = [rule for rule in self.active if named(word, rule.id)]
                if meant and not any(rule.condition.absence or self._fed(rule) for rule in meant):
                    text = f"no series of this test reaches {meant[0].id}, which watches {_wants(meant[0])}"
                    yield self._problem((*self.test.where, "only", index), "not-fed", text)
        elif self.active and not any(self._fed(rule) for rule in self.active):
            yield self._problem(where, "not-fed", "no rule watches a series of this test", key=True)

    def _fed(self, rule: Cause) -> bool:
        metric = rule.selector.metric
        if metric in self.inputs:
            return any(self._given(Selector(name), "any") for name in self._raw(metric))
        return self._given(rule.selector, rule.phase) or any(
            self._given(selector, "any") for selector, _ in rule.condition.parts if selector is not None
        )

    def _raw(self, metric: str) -> Iterator[str]:
        for name in self.inputs.get(metric, ()):
            if name in self.inputs:
                yield from self._raw(name)
            else:
                yield name

    def _given(self, selector: Selector, phase: str) -> bool:
        for source in self._sources():
            metric, labels = series_of(source.series)
            its_phase = "eval" if metric.startswith(EVAL_PREFIXES) else "train"
            if source.record is not None:
                its_phase = phase
            if metric == selector.metric and selector.matches(labels) and phase in ("any", its_phase):
                return True
        return False


def _watched(rule: Cause) -> Iterable[str]:
    yield rule.selector.metric
    for guard in rule.only_if:
        yield guard.metric
    for selector, _ in rule.condition.parts:
        if selector is not None:
            yield selector.metric


def _wants(rule: Cause) -> str:
    return f"{rule.selector}" + (f" in phase {rule.phase}" if rule.phase != "any" else "")
