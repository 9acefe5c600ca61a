"""One rule-test file at work: its rules, its checks, its tests with their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from healthcheck.errors import Problem, RuleFileError
from healthcheck.registry import Registry
from healthcheck.rulelang.rule import Rule, RuleSet, Span
from healthcheck.ruletests.check import problems_with
from healthcheck.ruletests.compare import Difference, compare
from healthcheck.ruletests.loading import load_tests
from healthcheck.ruletests.model import RuleTest
from healthcheck.ruletests.play import Played, play
from healthcheck.ruletests.report import failure_text
from healthcheck.ruletests.timeline import RecordError
from healthcheck.verdicts import State

LoadRules = Callable[..., RuleSet]
"""``load(rules=[...], profile=, only=, off=, set=)``: the assembly's, with its plugin host bound."""


@dataclass(frozen=True, slots=True)
class Result:
    """How one test ended. ``text`` is empty when it passed."""

    text: str
    differences: tuple[Difference, ...]
    fired: tuple[str, ...]
    """Rules that had an episode."""
    silent: tuple[str, ...]
    """Rules that were judged and had none."""

    @property
    def passed(self) -> bool:
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
                rules.rules = [_warmed(rule, test.warmup) for rule in rules.rules]
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
        fired = tuple(dict.fromkeys(episode.alert.rule for episode in played.episodes))
        return Result(text, tuple(found), fired, tuple(_silent(played, fired)))

    @property
    def rules_name(self) -> str:
        """What the tested rules are called: two test files over the same rules share their coverage."""
        return " + ".join("rules in place" if isinstance(entry, dict) else str(entry) for entry in self.file.rules)

    def own_rules(self) -> list[str]:
        """Ids of the rules that the named files write or change, packs that they extend left out."""
        named = {str(entry) for entry in self.file.rules if not isinstance(entry, dict)}
        names = named | {Path(entry).name for entry in named}
        found: dict[str, None] = {}
        for rules in self._base.values():
            for rule in rules.rules:
                if any(place in names or Path(place).name in names for place in _places(rule)) or len(names) < len(
                    self.file.rules
                ):
                    found[rule.id] = None
        return list(found)


def _places(rule: Rule) -> Iterable[str]:
    return {rule.origin.path, *(origin.path for origin in rule.key_origins.values())}


def _warmed(rule: Rule, steps: int) -> Rule:
    """The rule with the warm-up of the test, as ``defaults: {warmup: ...}`` would give it."""
    exempt = rule.condition.judges_nonfinite or rule.condition.absence
    return rule if exempt and not rule.warmup.amount else replace(rule, warmup=Span(steps))


def _silent(played: Played, fired: tuple[str, ...]) -> Iterable[str]:
    """Rules that some series brought as far as a judgement, and that never fired."""
    judged = (State.OK, State.PENDING, State.FIRING)
    for rule in played.rules.rules:
        states = [e.by_id[rule.id] for e in played.engines.values() if rule.id in e.by_id]
        if rule.id not in fired and any(
            s is not None and s.state in judged for st in states for s in st.series.values()
        ):
            yield rule.id
