"""What rules look up beside their own samples: guards, derived metrics, parts on another metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from healthcheck.engine.combined import Side
from healthcheck.engine.rulestate import RuleState
from healthcheck.protocols import Comparator
from healthcheck.rulelang.rule import Derived, Guard
from healthcheck.samples import NO_LABELS, Labels, Sample, decode_number, encode_number


class Question:
    """What several rules ask of one metric with the same words in ``only_if``."""

    __slots__ = ("answer", "states", "test")

    def __init__(self, test: Comparator, states: Sequence[RuleState]) -> None:
        self.test = test
        self.states = states
        self.answer: bool | None = None
        """The last one."""


class Watch(NamedTuple):
    """What hangs on one series."""

    metric: str
    questions: tuple[Question, ...]
    feeds: tuple[Callable[[float], None], ...]
    """Look-ups of its past in formulas."""
    ready: tuple[Derived, ...]
    """Formulas that may have a value when this has one."""
    is_input: bool
    """Whether some formula looks at it."""


Derivation = tuple[Derived, int]
"""A formula that may have a value, and the place of the sample that says when and where."""


def derivations(watches: Iterable[tuple[int, Watch]]) -> tuple[Derivation, ...]:
    """The formulas that samples of one shape may make, each with the last sample that it waits for."""
    return tuple({formula: index for index, watch in watches for formula in watch.ready}.items())


class Lookups:
    """Remembers what some rule looks up; computes a derived metric where all its bare inputs are."""

    def __init__(self, states: Iterable[RuleState], derived: Sequence[Derived]) -> None:
        self.derived = list(derived)
        self.last: dict[str, float] = {}
        """Metric -> its last value, where a guard or a formula asks for it."""
        self._steps: dict[str, int] = {}
        """The steps of the last values that formulas ask for."""
        self._states = list(states)

    def sides(self, metric: str, labels: Labels) -> list[Side]:
        """Parts of rules on other metrics that look at this series."""
        return [
            side
            for state in self._states
            for side in state.sides
            if side.selector.metric == metric and side.selector.matches(labels)
        ]

    def watch(self, metric: str, labels: Labels) -> Watch | None:
        """What hangs on samples of one series; None if nothing does. Guards and formulas take plain metrics only."""
        if labels:
            return None
        asking: dict[str, list[tuple[Guard, RuleState]]] = {}
        for state in self._states:
            for guard in state.rule.only_if:
                if guard.metric == metric and _held_by_guards(state):
                    asking.setdefault(guard.test.text, []).append((guard, state))
        guards = any(g.metric == metric for state in self._states for g in state.rule.only_if)
        formulas = [formula for formula in self.derived if metric in formula.inputs]
        if not (guards or formulas):
            return None
        return Watch(
            metric,
            tuple(Question(who[0][0].test, [state for _, state in who]) for who in asking.values()),
            tuple(feed for formula in formulas for feed in formula.feeds(metric)),
            tuple(formula for formula in formulas if metric in formula.triggers),
            bool(formulas),
        )

    def take(
        self, samples: Sequence[Sample], watches: Iterable[tuple[int, Watch]], made_here: Iterable[Derivation]
    ) -> list[Sample]:
        """Look at the samples of one evaluation before they are judged; returns the derived samples that they give.

        A derived metric has a value at a step when all its bare inputs have one there, whichever
        evaluation of that step brought them; it is computed once per evaluation, from the last.
        """
        last, steps = self.last, self._steps
        for index, (metric, questions, feeds, _, is_input) in watches:
            sample = samples[index]
            value = sample.value
            if questions and last.get(metric) != value:
                last[metric] = value
                for question in questions:
                    answer = question.test(value)
                    if answer is not question.answer:
                        question.answer = answer
                        self._open_or_shut(question.states)
            last[metric] = value
            if is_input:
                steps[metric] = sample.step
                for feed in feeds:
                    feed(value)
        made = []
        for formula, index in made_here:
            sample = samples[index]
            step = sample.step
            for name in formula.triggers:
                if steps.get(name) != step:
                    break
            else:
                value = formula.compute(last.get)
                if value is not None:
                    made.append(Sample(formula.name, step, value, NO_LABELS, sample.phase, sample.time))
        return made

    def _open_or_shut(self, states: Iterable[RuleState]) -> None:
        """Whether the guards of these rules hold, all of them."""
        for state in states:
            holds = self._holds(state)
            if state.shut is holds:
                state.wake()
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
