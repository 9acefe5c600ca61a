"""Step time and rates, with a clock of our own."""

from __future__ import annotations

import pytest
from driver import Watched

from healthcheck.core.events import EventKind
from healthcheck.probes.steps import StepPartsProbe, StepTimeProbe


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def step(watched: Watched, clock: Clock, number: int, seconds: float, **facts) -> None:
    clock.now += seconds
    watched.emit(EventKind.STEP_END, number, **facts)


def test_the_first_step_has_no_time(clock: Clock) -> None:
    watched = Watched([StepTimeProbe(clock)])
    step(watched, clock, 1, 60.0)
    step(watched, clock, 2, 2.0)
    assert watched.of("time.step") == [(2, 2.0)]


@pytest.mark.parametrize("pause", [EventKind.EVAL_END, EventKind.CHECKPOINT_SAVED, EventKind.EPOCH_END])
def test_a_step_with_an_interruption_before_it_has_no_time(clock: Clock, pause: EventKind) -> None:
    watched = Watched([StepTimeProbe(clock)])
    step(watched, clock, 1, 1.0)
    step(watched, clock, 2, 1.0)
    clock.now += 600
    watched.emit(pause, 2)
    step(watched, clock, 3, 1.0)
    step(watched, clock, 4, 1.0)
    assert [n for n, _ in watched.of("time.step")] == [2, 4]
    assert [n for n, _ in watched.of("throughput")] == [2, 4]


def test_an_interruption_before_every_step_is_a_part_of_it(clock: Clock) -> None:
    watched = Watched([StepTimeProbe(clock)])
    for number in range(1, 21):
        step(watched, clock, number, 1.5)
        clock.now += 0.5
        watched.emit(EventKind.EVAL_START, number)
    assert watched.of("time.step") == [(n, 2.0) for n in range(7, 21)]  # the sixth in a row


def test_an_interruption_before_every_other_step_never_is(clock: Clock) -> None:
    watched = Watched([StepTimeProbe(clock)])
    for number in range(1, 41):
        step(watched, clock, number, 1.0)
        if number % 2:
            clock.now += 60
            watched.emit(EventKind.EVAL_START, number)
    assert {seconds for _, seconds in watched.of("time.step")} == {1.0}


def test_throughput_counts_samples_once_they_are_known_and_never_mixes_units(clock: Clock) -> None:
    watched = Watched([StepTimeProbe(clock)])
    for number, n in enumerate((None, None, 32, None, 16), start=1):
        step(watched, clock, number, 0.5, n_samples=n)
    assert watched.of("throughput") == [(2, 2.0), (3, 64.0), (5, 32.0)]


def test_micro_batches_add_their_samples_tokens_and_waits(clock: Clock) -> None:
    watched = Watched([StepTimeProbe(clock)])
    step(watched, clock, 1, 1.0)
    for _ in range(4):
        watched.emit(EventKind.BATCH_READY, 2, n_samples=8, n_tokens=100, data_wait=0.125)
    step(watched, clock, 2, 2.0)
    assert watched.last("throughput") == 16.0
    assert watched.last("tokens_per_sec") == 200.0
    assert watched.last("time.data") == 0.5


def test_two_optimizers_end_one_step_once(clock: Clock) -> None:
    watched = Watched([StepTimeProbe(clock)])
    for number in (1, 2, 3):
        step(watched, clock, number, 1.0, optimizer_index=0)
        step(watched, clock, number, 1.0, optimizer_index=1)
    assert watched.values("time.step") == [2.0, 2.0]


def test_progress_and_time_to_go(clock: Clock) -> None:
    watched = Watched([StepTimeProbe(clock)])
    for number in range(1, 21):
        step(watched, clock, number, 3.0, max_steps=100)
    assert watched.of("eta")[0][0] == 11  # ten timed steps first
    assert watched.last("eta") == 240.0
    assert watched.last("progress") == 0.2


def test_parts_of_a_step(clock: Clock) -> None:
    watched = Watched([StepPartsProbe(clock)])
    for kind, seconds in (
        (EventKind.BATCH_READY, 1.0),
        (EventKind.LOSS, 0.25),
        (EventKind.BATCH_READY, 1.0),
        (EventKind.LOSS, 0.25),
        (EventKind.BACKWARD_END, 0.75),
        (EventKind.BEFORE_UPDATE, 1.0),
        (EventKind.AFTER_UPDATE, 0.125),
        (EventKind.STEP_END, 1.0),
    ):
        clock.now += seconds
        watched.emit(kind, 1)
    assert watched.last("time.forward") == 0.5
    assert watched.last("time.backward") == 0.75
    assert watched.last("time.optimizer") == 0.125
