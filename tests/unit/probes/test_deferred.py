"""Deferred numbers: written like floats, calculated when they have arrived, never waited for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from standin import LateMemory, NoReads, elsewhere

from healthcheck.core.protocols import Bound
from healthcheck.core.samples import Sample
from healthcheck.device.deferred import (
    Deferred,
    calculate,
    count,
    is_finite,
    largest,
    maximum,
    minimum,
    number,
    numbers,
    quotient,
    smallest,
    value_of,
    values_of,
    where,
)
from healthcheck.device.mailbox import StepMailbox
from healthcheck.instrument.gate import Limit, device_flag

SOME = (-2.5, -0.0, 0.0, 1.0, 7.25, math.inf, -math.inf, math.nan)

OF_ONE: dict[str, Callable[[Any], Any]] = {
    "negative": lambda x: -x,
    "plus": lambda x: x + 1.5,
    "added to": lambda x: 1.5 + x,
    "minus": lambda x: x - 1.5,
    "taken from": lambda x: 1.5 - x,
    "times": lambda x: x * 3.0,
    "multiplied with": lambda x: 3.0 * x,
    "divided": lambda x: x / 4.0,
    "divided by": lambda x: quotient(4.0, x),
    "above": lambda x: where(x > 1.0, 1.0, 0.0),
    "at least": lambda x: where(x >= 1.0, 1.0, 0.0),
    "below": lambda x: where(x < 1.0, 1.0, 0.0),
    "at most": lambda x: where(x <= 1.0, 1.0, 0.0),
    "finite": lambda x: where(is_finite(x), 1.0, 0.0),
    "at most 2": lambda x: minimum(2.0, x),
    "at least 2": lambda x: maximum(x, 2.0),
    "of its own": lambda x: calculate(lambda n: n * n if n > 0 else None, x),
}
OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: x - y,
    "product": lambda x, y: x * y,
    "quotient": quotient,
    "larger": maximum,
    "smaller": minimum,
    "larger first": lambda x, y: where(x > y, 1.0, 0.0),
    "chosen": lambda x, y: where(is_finite(x) * (x > 0.0), x, y),
    "largest": lambda x, y: largest([x, y, 1.0]),
    "smallest": lambda x, y: smallest([x, y, 1.0]),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Any]:
    """Makes a deferred number of a float, as if it were on a device."""
    elsewhere(monkeypatch)
    return lambda x: number(torch.tensor(x, dtype=torch.float64))


def same(one: Any, other: Any) -> bool:
    return one == other or (one is not None and other is not None and one != one and other != other)


@pytest.mark.parametrize("name", OF_ONE)
def test_a_deferred_number_is_the_float_that_the_host_would_have_calculated(name: str, device: Any) -> None:
    of = OF_ONE[name]
    for x in SOME:
        with NoReads():
            made = of(device(x))
        assert isinstance(made, Deferred)
        assert same(made.value(), of(x)), (name, x, made.value(), of(x))


@pytest.mark.parametrize("name", OF_TWO)
def test_so_it_is_of_two_numbers_one_or_both_of_which_are_deferred(name: str, device: Any) -> None:
    of = OF_TWO[name]
    for x in SOME:
        for y in SOME:
            for made in (of(device(x), y), of(x, device(y)), of(device(x), device(y))):
                assert same(value_of(made), of(x, y)), (name, x, y, value_of(made), of(x, y))


@pytest.mark.parametrize("name", [name for name in OF_ONE if name != "of its own"])
def test_its_form_on_the_device_is_the_same_number(name: str, device: Any) -> None:
    """A gate compares it there, before the host can know it."""
    of = OF_ONE[name]
    for x in SOME:
        with NoReads():
            tensor = of(device(x)).on_device()
        assert tensor.dim() == 0
        assert same(float(tensor), of(x)), (name, x)


@pytest.mark.parametrize("name", [name for name in OF_TWO if name not in ("largest", "smallest")])
def test_so_it_is_of_two(name: str, device: Any) -> None:
    of = OF_TWO[name]
    for x in SOME:
        for y in SOME:
            for made in (of(device(x), y), of(x, device(y)), of(device(x), device(y))):
                found = float(made.on_device() if isinstance(made, Deferred) else made)
                assert found == pytest.approx(of(x, y), rel=1e-15, nan_ok=True), (name, x, y)


def test_what_only_the_host_can_calculate_has_no_form_on_the_device(device: Any) -> None:
    assert calculate(lambda n: n + 1, device(1.0)).on_device() is None
    assert (calculate(lambda n: n + 1, device(1.0)) + 1.0).on_device() is None


def test_a_float_stays_a_float() -> None:
    x, y = number(torch.tensor(3.0)), number(2)
    made = [x + y, x / y, where(x > y, x, y), minimum(x, y), quotient(x, y), largest([x, y]), calculate(math.sqrt, x)]
    assert [type(value) for value in made] == [float] * len(made)


def test_nobody_asks_for_the_truth_of_a_number_that_has_not_arrived(device: Any) -> None:
    """``if norm > limit`` would wait for the device in every step."""
    with pytest.raises(TypeError, match="where"):
        bool(device(1.0) > 0.5)
    with pytest.raises(TypeError):
        float(device(1.0))  # type: ignore[arg-type]


def test_a_vector_gives_its_elements_and_its_numbers(device: Any) -> None:
    vector = numbers(torch.tensor([3.0, math.nan, 1.0]))
    assert len(vector) == 3
    assert vector[0].value() == 3.0
    assert vector[2].on_device() == 1.0
    assert math.isnan(largest(vector).value())
    assert count(numbers(torch.tensor([True, False, True]))).value() == 2.0
    assert calculate(lambda n, more: sum(n[::2]) + more, vector, device(1.0)).value() == 5.0
    assert list(values_of(vector))[::2] == [3.0, 1.0]


def test_it_is_calculated_once_however_often_it_is_asked_for(device: Any) -> None:
    """Functions may keep something from one step to the next, such as the best loss so far."""
    calls: list[float] = []
    made = calculate(lambda n: calls.append(n) or float(len(calls)), device(1.0))
    double = made * 2.0
    assert [made.value(), double.value(), made.value(), value_of(made)] == [1.0, 2.0, 1.0, 1.0]
    assert calls == [1.0]


def test_a_sum_of_hundreds_of_micro_batches_is_no_recursion(device: Any) -> None:
    total = device(0.0)
    for _ in range(3000):
        total = total + device(1.0)
    assert sum(1 for _ in total.leaves()) == 3001
    assert total.on_device() == 3000.0
    assert total.value() == 3000.0


def test_values_arrive_late_complete_in_order_and_without_a_read(device: Any) -> None:
    memory = LateMemory(looks=2)
    mailbox = StepMailbox(memory=memory)
    best = [math.inf]

    def lowest(loss: float) -> float:
        best[0] = min(best[0], loss)
        return best[0]

    seen: list[tuple[str, int, float]] = []
    tensors = []
    for step in range(1, 9):
        with NoReads():
            tensors.append(torch.tensor(float(10 - step)))
            loss = number(tensors[-1])
            row = numbers(torch.tensor([1.0 * step, 2.0]))
            mailbox.post(
                step,
                [
                    Sample("loss", step, loss / 2.0),
                    Sample("lr", step, 0.1),
                    Sample("best", step, calculate(lowest, loss)),
                    Sample("row", step, row[0] + row[1]),
                ],
            )
            tensors[-1].zero_()  # of the next step: what was sent is of its own
            seen += [(s.metric, s.step, s.value) for s in mailbox.ready()]
    assert 0 < len(seen) < 32, "nothing waits, and nothing comes before its time"
    seen += [(s.metric, s.step, s.value) for s in mailbox.drain()]
    assert seen == [
        entry
        for step in range(1, 9)
        for entry in (
            ("loss", step, (10 - step) / 2),
            ("lr", step, 0.1),
            ("best", step, 10.0 - step),
            ("row", step, step + 2.0),
        )
    ]
    assert memory.copies == 8, "one copy a step"


def test_what_turns_out_to_be_no_number_gives_no_sample(device: Any) -> None:
    """Missing is not 0, and not NaN."""
    mailbox = StepMailbox(memory=LateMemory())
    share = calculate(lambda part, whole: part / whole if whole else None, device(0.0), device(0.0))
    mailbox.post(1, [Sample("share", 1, share), Sample("double", 1, share * 2.0), Sample("lr", 1, 0.1)])
    assert [s.metric for s in mailbox.drain()] == ["lr"]


def test_a_gate_compares_the_number_that_its_rule_judges(device: Any) -> None:
    """Not one of those that it is made of: the mean of two losses, a norm without its scale."""
    sums_to_8, scaled, scale = device(3.0) + device(5.0), device(4096.0), device(1024.0)
    for value in (sums_to_8 / 2.0, scaled / scale):
        assert device_flag([(Sample("loss", 1, value), Limit("r", Bound(-math.inf, 5.0)))]) == 0.0
        assert device_flag([(Sample("loss", 1, value), Limit("r", Bound(-math.inf, 3.0)))]) == 1.0
    late = calculate(lambda n: n, device(8.0))
    assert device_flag([(Sample("loss", 1, late), Limit("r", Bound(-math.inf, 5.0)))]) is None, (
        "what only the host can say waits for it"
    )
