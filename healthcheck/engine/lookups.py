"""What rules look up beside their own samples: guards, derived metrics, parts on another metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from healthcheck.engine.combined import Side
from healthcheck.engine.rulestate import RuleState
from healthcheck.rulelang.rule import Derived, Guard
from healthcheck.samples import NO_LABELS, Labels, Sample, decode_number, encode_number


class Watch(NamedTuple):
    """What hangs on one series."""

    metric: str
    """Its name, if a guard or a formula looks it up; else empty."""
    guards: tuple[tuple[Guard, RuleState], ...]
    formulas: tuple[tuple[Derived, bool, bool], ...]
    """(formula, whether it looks back at this metric, whether it may have a value when this has one)"""
    sides: tuple[Side, ...]


class Lookups:
    """Remembers what some rule looks up; computes a derived metric where all its bare inputs are."""

    def __init__(self, states: Iterable[RuleState], derived: Sequence[Derived]) -> None:
        self.derived = list(derived)
        self.last: dict[str, float] = {}
        """Metric -> its last value, where a guard or a formula asks for it."""
        self._steps: dict[str, int] = {}
        """The steps of the last values that formulas ask for."""
        self._states = list(states)

    def watch(self, metric: str, labels: Labels) -> Watch | None:
        """What hangs on samples of one series; None if nothing does. Guards and formulas take plain metrics only."""
        sides = [
            side
            for state in self._states
            for side in state.sides
            if side.selector.metric == metric and side.selector.matches(labels)
        ]
        if labels:
            return Watch("", (), (), tuple(sides)) if sides else None
        guards = [(g, state) for state in self._states for g in state.rule.only_if if g.metric == metric]
        formulas = [(f, metric in f.remembers, metric in f.triggers) for f in self.derived if metric in f.inputs]
        if not (sides or guards or formulas):
            return None
        name = metric if guards or formulas else ""
        return Watch(name, tuple(g for g in guards if _held_by_guards(g[1])), tuple(formulas), tuple(sides))

    def take(self, samples: Sequence[Sample], watches: Iterable[tuple[int, Watch]]) -> list[Sample]:
        """Look at the samples of one evaluation before they are judged; returns the derived samples that they give.

        A derived metric has a value at a step when all its bare inputs have one there, whichever
        evaluation of that step brought them; it is computed once per evaluation, from the last.
        """
        ready: dict[Derived, Sample] = {}
        last, steps = self.last, self._steps
        for index, (metric, guards, formulas, sides) in watches:
            sample = samples[index]
            value = sample.value
            if metric:
                if guards and last.get(metric) != value:
                    last[metric] = value
                    self._ask(guards)
                last[metric] = value
                if formulas:
                    steps[metric] = sample.step
                    for formula, looks_back, triggers in formulas:
                        if looks_back:
                            formula.feed(metric, value)
                        if triggers:
                            ready[formula] = sample
            for side in sides:
                side.feed(sample)
        made = []
        for formula, sample in ready.items():
            step = sample.step
            for name in formula.triggers:
                if steps.get(name) != step:
                    break
            else:
                value = formula.compute(last.get)
                if value is not None:
                    made.append(Sample(formula.name, step, value, NO_LABELS, sample.phase, sample.time))
        return made

    def _ask(self, guards: Iterable[tuple[Guard, RuleState]]) -> None:
        """Whether the guards of these rules hold, all of them."""
        for guard, state in guards:
            holds = guard.test(self.last[guard.metric])
            if holds and state.shut:
                holds = self._holds(state)
            state.shut = not holds

    def _holds(self, state: RuleState) -> bool:
        """A guard without samples counts as satisfied."""
        last = self.last
        return all(guard.metric not in last or guard.test(last[guard.metric]) for guard in state.rule.only_if)

    # -- resume -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "derived": {d.name: {"text": d.text, "state": d.state()} for d in self.derived},
            "last": {name: [self._steps.get(name), encode_number(value)] for name, value in self.last.items()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> list[str]:
        """Restore; returns one sentence for each derived metric that starts fresh."""
        told = []
        for formula in self.derived:
            fresh = formula.state()
            try:
                entry = saved["derived"].get(formula.name)
                if entry is not None and entry["text"] == formula.text:
                    formula.restore(entry["state"])
            except Exception as error:  # as for rules: one that cannot be read must not take the others with it
                formula.restore(fresh)
                told.append(
                    f"{formula.name} starts fresh: its saved state cannot be read ({type(error).__name__}: {error})"
                )
        self.last = {name: decode_number(value) for name, (_, value) in saved["last"].items()}
        self._steps = {name: int(step) for name, (step, _) in saved["last"].items() if step is not None}
        for state in self._states:
            if state.rule.only_if and _held_by_guards(state):
                state.shut = not self._holds(state)
        return told


def _held_by_guards(state: RuleState) -> bool:
    """Not so rules on absence and on siblings: these are judged as they come."""
    return not (state.across or state.rule.condition.absence)
