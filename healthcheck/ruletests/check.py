"""Mistakes of a test file that only show beside its rules: unknown ids, series that feed nobody."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping

from healthcheck.dispatch import suggest
from healthcheck.errors import Problem
from healthcheck.registry import Registry
from healthcheck.rulelang.document import Document, KeyPath
from healthcheck.rulelang.rule import Rule, RuleSet, Selector
from healthcheck.ruletests.model import RuleTest, RuleTestFile, Source
from healthcheck.ruletests.timeline import EVAL_PREFIXES, series_of


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
        self.ids = [rule.id for rule in rules.rules] + list(rules.off)
        self.active = [rule for rule in rules.rules if self._plays(rule.id)]
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
        chosen = not self.test.only or any(_same(rule, word) for word in self.test.only)
        return chosen and not any(_same(rule, word) for word in self.test.off)

    def _problem(self, where: KeyPath, slug: str, message: str, suggestion: str = "", *, key: bool = False) -> Problem:
        return self.document.problem(where, slug, message, suggestion=suggestion, key=key)

    # -- ids --------------------------------------------------------------------------

    def _ids(self) -> Iterator[Problem]:
        where = self.test.where
        for key, words in (("only", self.test.only), ("off", self.test.off)):
            for index, word in enumerate(words):
                if not any(_same(rule, word) for rule in self.ids):
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
                    (*entry.where, "rule"), "rule-off", f'"{entry.rule}" does not play in this test (only, off)'
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
        known |= {name for rule in self.rules.rules for name in _watched(rule)}
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
                named = [rule for rule in self.active if _same(rule.id, word)]
                if named and not any(rule.condition.absence or self._fed(rule) for rule in named):
                    text = f"no series of this test reaches {named[0].id}, which watches {_wants(named[0])}"
                    yield self._problem((*self.test.where, "only", index), "not-fed", text)
        elif self.active and not any(self._fed(rule) for rule in self.active):
            yield self._problem(where, "not-fed", "no rule watches a series of this test", key=True)

    def _fed(self, rule: Rule) -> bool:
        metric = rule.selector.metric
        if metric in self.inputs:
            return any(self._given(Selector(name), "any") for name in self._raw(metric))
        return self._given(rule.selector, rule.phase) or any(
            self._given(selector, "any") for selector, _ in getattr(rule.condition, "parts", ()) if selector is not None
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


def _watched(rule: Rule) -> Iterable[str]:
    yield rule.selector.metric
    for guard in rule.only_if:
        yield guard.metric
    for selector, _ in getattr(rule.condition, "parts", ()):
        if selector is not None:
            yield selector.metric


def _wants(rule: Rule) -> str:
    return f"{rule.selector}" + (f" in phase {rule.phase}" if rule.phase != "any" else "")


def _same(rule: str, word: str) -> bool:
    return rule == word or fnmatch.fnmatchcase(rule, word)
