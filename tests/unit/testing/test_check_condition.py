"""``check_plugin`` on conditions: what is missing, and what does not work without it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from healthcheck import Bound, CompiledCondition, ConditionType, OptionError, Threshold, exact_bound
from healthcheck.rulelang.conditions import CONDITIONS
from healthcheck.testing.conditioncheck import check_condition


class Mean:
    """A scorer without a mistake: value / mean of all before it."""

    memoryless = False

    def __init__(self) -> None:
        self.normal: float | None = None
        self.total, self.count = 0.0, 0

    def level(self) -> float | None:
        return self.total / self.count if self.count and self.total > 0 else None

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Any) -> list[Any]:
        scored = []
        for value in values:
            level = self.level()
            self.normal = level if level is not None else self.normal
            scored.append((value / level if level is not None else None, self.normal))
            self.total, self.count = self.total + value, self.count + 1
        return scored

    def bound(self, healthy: Any) -> Any:
        level = self.level()
        if level is None:
            return None
        return exact_bound(lambda value: value / level, healthy, healthy.low * level, healthy.high * level)

    def state(self) -> Any:
        return [self.total, self.count, self.normal]

    def restore(self, state: Any) -> None:
        self.total, self.count, self.normal = state


def condition(scorer: Callable[..., Any] = Mean, breaches: Any = None, **keys: Any) -> ConditionType:
    test = breaches or Threshold("above", 3)
    compiled = CompiledCondition("mine.times", test, scorer, **{"bounded": True, "baseline": True, **keys})
    return ConditionType("mine.times", {"type": "number"}, lambda options, rule: compiled, help="many times the mean")


def only(kind: ConditionType) -> str:
    [problem] = check_condition(kind)
    return problem


def test_a_condition_that_does_all_has_no_mistakes() -> None:
    assert list(check_condition(condition())) == []


@pytest.mark.parametrize("kind", CONDITIONS, ids=lambda kind: kind.name)
def test_the_built_ins_have_none(kind: ConditionType) -> None:
    if kind.name not in ("all", "any"):  # made of others
        assert list(check_condition(kind)) == []


# --------------------------------------------------------------------------- what is missing


def test_a_comparator_without_closer_and_quiet_is_named_with_what_does_not_work() -> None:
    """The old form: a text and a call. Its rules fired, and their closest value was wrong."""

    class AtLeast:
        text = "at least 3"

        def __call__(self, score: float) -> bool:
            return score >= 3

    found = list(check_condition(condition(breaches=AtLeast())))
    assert (
        'condition "mine.times": its comparator has no "closer": the closest value of a run and the worst of several '
        "series are not found" in found
    )
    assert any(
        '"healthy": healthy samples are not passed over, and no update can be held back' in text for text in found
    )


def test_a_scorer_without_bound_and_state_is_named_with_what_does_not_work() -> None:
    class Forgets:
        normal = None
        memoryless = False

        def update(self, values: Any, steps: Any, quiet: Any) -> Any:
            return [(value, None) for value in values]

    found = list(check_condition(condition(Forgets)))
    assert found == [
        'condition "mine.times": its scorer has no "bound": no rule with it can hold back the update of a bad value',
        'condition "mine.times": its scorer has no "state": a resumed run begins again with an empty memory',
        'condition "mine.times": its scorer has no "restore": a resumed run begins again with an empty memory',
    ]


def test_a_compiled_form_without_a_field_is_named() -> None:
    class Bare:
        name, breaches, absence, parts = "mine.times", Threshold("above", 3), "", ()
        start = staticmethod(Mean)
        sentence, judges_nonfinite, baseline, min_samples, window, first, across = "", False, True, 1, 0, 0.0, ""

    kind = dataclasses.replace(condition(), compile=lambda options, rule: Bare())  # type: ignore[arg-type,return-value]
    assert only(kind) == (
        'condition "mine.times": its compiled form has no "bounded": no rule with it can hold back the update of a bad value'
    )


# --------------------------------------------------------------------------- what goes wrong


def test_the_old_form_of_update_is_named() -> None:
    class Old(Mean):
        def update(self, value: float, step: int) -> float | None:  # type: ignore[override]
            return value

    assert "update cannot be tried: it raised TypeError" in only(condition(Old))


def test_an_answer_of_another_length_is_named() -> None:
    class Silent(Mean):
        def update(self, values: Any, steps: Any, quiet: Any) -> Any:
            super().update(values, steps, quiet)
            return []

    assert "update must return one (score, normal) for each value when nothing is quiet" in only(condition(Silent))


def test_a_run_that_is_scored_as_one_is_named() -> None:
    class Together(Mean):
        def update(self, values: Any, steps: Any, quiet: Any) -> Any:
            level = self.level()
            super().update(values, steps, quiet)
            return [(value / level if level else None, level) for value in values]

    found = list(check_condition(condition(Together)))
    assert any("scores differ when 2 samples come in one run" in text for text in found)


def test_a_breach_that_is_left_out_is_named() -> None:
    class Careless(Mean):
        def update(self, values: Any, steps: Any, quiet: Any) -> Any:
            scored = super().update(values, steps, quiet)
            return scored if quiet.low > quiet.high else []

    assert any("a breach is overlooked" in text for text in check_condition(condition(Careless)))


@pytest.mark.parametrize("kept", ["the count alone", "NaN"])
def test_a_memory_that_does_not_survive_a_resume_is_named(kept: str) -> None:
    class Half(Mean):
        def state(self) -> Any:
            return [math.nan if kept == "NaN" else 0.0, self.count, self.normal]

    said = (
        "its state is not JSON"
        if kept == "NaN"
        else "after restore(state()) scores differ: a resumed run judges differently"
    )
    assert any(said in text for text in check_condition(condition(Half)))


def test_a_bound_that_is_off_by_a_bit_is_named() -> None:
    """`limit * level` is right but for rounding, and the update is let through although its value then breaches."""

    class Rounded(Mean):
        def bound(self, healthy: Any) -> Any:
            found = super().bound(healthy)
            return found and Bound(found.low, math.nextafter(found.high, math.inf))

    problem = only(condition(Rounded))
    assert "bound and score disagree" in problem
    assert "would be let through" in problem


def test_a_bound_that_nobody_may_use_and_one_that_never_comes_are_named() -> None:
    assert "`bounded` is False: no rule with it can hold back an update" in only(condition(bounded=False))

    class Never(Mean):
        def bound(self, healthy: Any) -> None:
            return None

    assert "bound never gives an interval: an update that a rule holds back is let through" in only(condition(Never))
    assert list(check_condition(condition(Never, bounded=False))) == []


def test_a_comparator_that_calls_breaches_healthy_is_named() -> None:
    class Wide(Threshold):
        def __call__(self, score: float) -> bool:
            return score > 1

    assert any(
        "lies within `healthy` and breaches: it would be overlooked" in t
        for t in check_condition(condition(breaches=Wide("above", 3)))
    )


def test_a_comparator_whose_quiet_is_too_wide_is_named() -> None:
    class Quiet(Threshold):
        def quiet(self, closest: float) -> Any:
            return self.healthy

    problem = only(condition(breaches=Quiet("above", 3)))
    assert "which is closer to a breach: the closest value of a run is wrong" in problem


# --------------------------------------------------------------------------- options to try it with


def test_options_come_from_the_examples_of_the_schema() -> None:
    seen: list[Any] = []

    def compiles(options: Any, rule: Any) -> Any:
        seen.append(options)
        return condition().compile(options, rule)

    schema = {"type": "object", "required": ["above"], "examples": [{"above": 7}]}
    assert list(check_condition(ConditionType("mine.c", schema, compiles, help="x"))) == []
    assert seen == [{"above": 7}]


def test_options_that_nobody_can_guess_are_asked_for() -> None:
    def compiles(options: Any, rule: Any) -> Any:
        raise OptionError("only the magic word will do")

    kind = ConditionType("mine.c", {"type": "string"}, compiles, help="x")
    assert 'give the schema "examples" that compile' in only(kind)
    assert 'its schema leaves open what to try it with; give it "examples"' in only(
        ConditionType("mine.c", {"type": "string", "pattern": "^never$"}, compiles, help="x")
    )
