"""The judge on its own: what is posted when, what is handed out, and which thread may judge what."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import healthcheck
from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.core.errors import StopTraining
from healthcheck.core.events import Event, EventKind
from healthcheck.core.samples import Sample
from healthcheck.engine.columns import History
from healthcheck.engine.engine import Engine
from healthcheck.engine.episodes import Evaluation
from healthcheck.extend.dispatch import Dispatch
from healthcheck.run.judge import Judge, acted_upon

OURS = str(Path(healthcheck.__file__).parent)
RULES: dict[str, Any] = {
    "loss-high": {"metric": "loss", "when": {"above": 5}},
    "silent": {"metric": "heartbeat", "when": {"stale": "10s"}},
}


class Box:
    """A mailbox that remembers what was posted, and keeps values of ``on_device`` metrics back until they are read."""

    def __init__(self, on_device: Sequence[str] = ()) -> None:
        self.posts: list[tuple[int, list[str]]] = []
        self._on_device = on_device
        self._queue: list[tuple[int, list[Sample]]] = []
        self._arrived: list[Sample] = []

    @property
    def oldest(self) -> int | None:
        return next((step for step, samples in self._queue if self._late(samples)), None)

    def _late(self, samples: Sequence[Sample]) -> bool:
        return any(sample.metric in self._on_device for sample in samples)

    def post(self, step: int, samples: Sequence[Sample]) -> None:
        self.posts.append((step, [sample.metric for sample in samples if sample.metric]))
        self._queue.append((step, list(samples)))

    def ready(self) -> list[Sample]:
        arrived, self._arrived = self._arrived, []
        while self._queue and not self._late(self._queue[0][1]):
            arrived += self._queue.pop(0)[1]
        return arrived

    def drain(self) -> list[Sample]:
        self.arrive()
        return self.ready()

    def arrive(self) -> None:
        """All values of the device have come."""
        self._on_device, late = (), self._on_device
        for _, samples in self._queue:
            for sample in samples:
                sample.value = float(sample.value)
            self._arrived += samples
        self._queue = []
        self._on_device = late


class OnDevice:
    """A number on a device, as far as the judge can tell: a 0-dim tensor without torch."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, number: float) -> None:
        self.number = number

    def __float__(self) -> float:
        return self.number


class Bench:
    """A judge with a real engine, and what it hands over."""

    name = "bench"

    def __init__(self, box: Box, acting: Sequence[str] = ()) -> None:
        host = plugin_host()
        rules = load_rules_for(host=host, rules={"version": 1, "external": ["heartbeat", "a", "b"], "rules": RULES})
        self.box = box
        self.arrived: list[tuple[int, float, list[str]]] = []
        self.found: list[tuple[list[str], EventKind | None]] = []
        self.dispatch, self.history = Dispatch(), History()
        self.dispatch.compile_reports([self])
        self.judge = Judge(
            Engine(rules),
            box,
            acting=lambda gated: frozenset(acting),
            history=self.history,
            dispatch=self.dispatch,
            shown=lambda step, samples: None,
            found=self._note,
        )

    def samples(self, step: int, samples: list[Sample]) -> None:
        """A report: what was handed out."""
        self.arrived.append((step, self.judge.judged_at, [sample.metric for sample in samples]))

    def _note(self, result: Evaluation, event: Event | None) -> None:
        self.found.append(([alert.rule for alert in result.alerts], None if event is None else event.kind))

    def at(self, kind: EventKind, step: int, **values: Any) -> None:
        self.judge.waiting += [Sample(metric, step, value) for metric, value in values.items()]
        self.judge(Event(kind, step), float(step))


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return lambda *given, **options: Bench(Box(*given), **options)


def long_ago(at: Bench, steps: int = 400) -> int:
    """A run that is no longer at its start; returns its next step."""
    for step in range(1, steps + 1):
        at.at(EventKind.STEP_END, step, a=1.0)
    at.judge.block_over(steps + 1, steps + 2.0)
    at.arrived.clear()
    at.box.posts.clear()
    return steps + 2


def short_steps(at: Bench, first: int, count: int, seconds: float, **values: Any) -> None:
    for nth in range(count):
        at.judge.waiting += [Sample(metric, first + nth, value) for metric, value in values.items()]
        at.judge(Event(EventKind.STEP_END, first + nth), first + nth * seconds)


def test_samples_are_posted_handed_out_and_judged_at_the_end_of_the_step(bench: Callable[..., Bench]) -> None:
    at = bench()
    at.at(EventKind.STEP_END, 3, loss=9.0, a=1.0)
    assert at.box.posts == [(3, ["loss", "a"])]
    assert at.arrived == [(3, 3.0, ["loss", "a"])]
    assert at.found == [(["loss-high"], EventKind.STEP_END)]
    assert at.judge.waiting == []


def test_short_steps_are_judged_together_in_the_order_in_which_they_came(bench: Callable[..., Bench]) -> None:
    at = bench()
    first = long_ago(at)
    short_steps(at, first, 31, 0.001, a=1.0, loss=9.0)
    assert at.arrived == []
    short_steps(at, first + 31, 1, 0.0, a=1.0)
    assert [step for step, _, _ in at.arrived] == list(range(first, first + 32))
    assert [now for _, now, _ in at.arrived[:31]] == [first + nth * 0.001 for nth in range(31)]
    assert at.found == [(["loss-high"], EventKind.STEP_END)]


@pytest.mark.parametrize("late", [False, True], ids=["host", "device"])
def test_a_step_of_a_block_costs_no_call_where_nobody_listens_to_single_steps(
    bench: Callable[..., Bench], late: bool
) -> None:
    def calls(steps: int) -> int:
        at, counted = bench(["norm"]), 0
        first = long_ago(at)
        if late:  # a number of the next step is still on the device
            at.box.post(first + steps, [Sample("norm", first + steps, OnDevice(1.0))])
        at.dispatch.compile_reports([])

        def rows(*, arrived_only: bool) -> list[Sample]:
            return [Sample(metric, step, float(step)) for step in range(first, first + steps) for metric in "ab"]

        def count(frame: FrameType, event: str, argument: object) -> None:
            nonlocal counted
            counted += event == "call" and frame.f_code.co_filename.startswith(OURS)

        at.judge.rows = rows
        known = sys.getprofile()
        sys.setprofile(count)
        at.judge.block_over(first + steps - 1, first + steps - 1.0)
        sys.setprofile(known)
        kept = [(step, float(step)) for step in range(first, first + steps)]
        assert at.history("a", steps) == at.history("b", steps) == kept
        return counted

    calls(2)  # what is done once in a process
    assert calls(30) == calls(3)


@pytest.mark.parametrize(("seconds", "most"), [(0.001, 32), (0.1, 3), (0.3, 1), (20.0, 1)])
def test_a_block_has_at_most_so_many_steps_and_so_much_time(
    bench: Callable[..., Bench], seconds: float, most: int
) -> None:
    """A stop comes at most so many steps after the sample that asked for it."""
    at, late = bench(), []
    first = long_ago(at)
    at.judge.block_over(first, float(first))
    for step in range(first + 1, first + 200):
        at.arrived.clear()
        now = first + (step - first) * seconds
        at.judge.waiting.append(Sample("b", step, 1.0, time=now))
        at.judge(Event(EventKind.STEP_END, step), now)
        late += [step - judged + 1 for judged, _, names in at.arrived if "b" in names]
    assert max(late) == most


def test_blocks_are_short_at_the_start(bench: Callable[..., Bench]) -> None:
    at = bench()
    judged = []
    for step in range(1, 400):
        before = len(at.arrived)
        at.judge.waiting.append(Sample("a", step, 1.0))
        at.judge(Event(EventKind.STEP_END, step), step * 1e-4)
        if len(at.arrived) > before:
            judged.append(step)
    assert judged[:16] == list(range(1, 17))
    assert all(later - step <= max(1, step // 8) for step, later in pairwise(judged))


@pytest.mark.parametrize(
    "kind", [EventKind.EVAL_END, EventKind.EPOCH_END, EventKind.CHECKPOINT_SAVED, EventKind.TRAIN_END]
)
def test_an_evaluation_an_epoch_a_checkpoint_and_the_end_end_a_block(
    bench: Callable[..., Bench], kind: EventKind
) -> None:
    at = bench()
    first = long_ago(at)
    short_steps(at, first, 5, 0.001, loss=9.0)
    assert at.found == []
    at.judge(Event(kind, first + 4), first + 1.0)
    assert [step for step, _, _ in at.arrived] == list(range(first, first + 5))
    assert at.found == [(["loss-high"], kind)]


@pytest.mark.parametrize("kind", [EventKind.BEFORE_UPDATE, EventKind.STEP_END])
def test_what_is_not_finite_ends_a_block_at_once(bench: Callable[..., Bench], kind: EventKind) -> None:
    at = bench()
    first = long_ago(at)
    short_steps(at, first, 5, 0.001, a=1.0)
    at.judge.waiting.append(Sample("loss", first + 5, float("nan")))
    at.judge(Event(kind, first + 5), first + 0.005)
    assert [step for step, _, _ in at.arrived] == list(range(first, first + 6))
    assert at.found == [(["loss-high"], kind)]


def test_what_is_not_finite_on_a_device_ends_the_block_when_it_comes(bench: Callable[..., Bench]) -> None:
    at = bench(("loss",))
    first = long_ago(at)
    short_steps(at, first, 3, 0.001, loss=OnDevice(float("nan")))
    assert at.found == []
    at.box.arrive()
    short_steps(at, first + 3, 1, 0.001, a=1.0)
    assert at.found == [(["loss-high"], EventKind.STEP_END)]


def test_before_the_update_nothing_is_judged_unless_a_rule_could_act_upon_it(bench: Callable[..., Bench]) -> None:
    calm, acting = bench(), bench(acting=["loss"])
    for at in (calm, acting):
        at.at(EventKind.BEFORE_UPDATE, 1, loss=9.0)
    assert (calm.box.posts, calm.found) == ([], [])
    assert acting.found == [(["loss-high"], EventKind.BEFORE_UPDATE)]
    calm.at(EventKind.STEP_END, 1)
    assert calm.found == [(["loss-high"], EventKind.STEP_END)]


def test_values_of_a_device_wait_for_the_end_of_the_step_and_travel_in_one_copy(bench: Callable[..., Bench]) -> None:
    at = bench(("b",), acting=["loss"])
    at.at(EventKind.BEFORE_UPDATE, 1, loss=1.0, b=OnDevice(2.0))
    at.at(EventKind.STEP_END, 1, a=1.0)
    assert at.box.posts == [(1, ["loss"]), (1, ["b", "a"])]


def test_a_step_waits_for_its_last_value_and_is_judged_whole(bench: Callable[..., Bench]) -> None:
    at = bench(("b",))
    at.at(EventKind.STEP_END, 1, a=1.0)
    at.at(EventKind.STEP_END, 2, a=1.0, b=OnDevice(2.0))
    at.at(EventKind.STEP_END, 3, a=1.0)
    assert [step for step, _, _ in at.arrived] == [1]
    at.box.arrive()
    at.at(EventKind.STEP_END, 4, a=1.0)
    assert at.arrived[1:] == [(2, 2.0, ["a", "b"]), (3, 3.0, ["a"]), (4, 4.0, ["a"])]


def test_rows_of_steps_without_events_come_with_the_block(bench: Callable[..., Bench]) -> None:
    at = bench()
    first = long_ago(at)
    rows = [Sample("loss", step, 1.0, time=step / 10) for step in range(first, first + 3)]
    at.judge.rows = lambda *, arrived_only: [rows.pop(0) for _ in list(rows)]
    at.judge.waiting.append(Sample("a", first + 1, 1.0))
    at.judge.block_over(first + 2, first + 9.0)
    assert [(step, names) for step, _, names in at.arrived] == [
        (first, ["loss"]),
        (first + 1, ["a", "loss"]),
        (first + 2, ["loss"]),
    ]
    assert at.judge.due_step == first + 2 + 32


def test_ranks_that_decide_together_end_a_block_where_they_may_agree(bench: Callable[..., Bench]) -> None:
    at, exchanged = bench(), []
    first = long_ago(at)
    at.judge.exchange, at.judge.exchange_every, at.judge.due_step = (lambda step: exchanged.append(step)), 10, 0
    short_steps(at, first, 40, 0.0, a=1.0)
    assert [step for step in exchanged if not step % 10] == [410, 420, 430, 440]
    assert [step for step, _, _ in at.arrived] == list(range(first, 441))


def test_values_of_another_step_are_judged_with_the_step_at_hand(bench: Callable[..., Bench]) -> None:
    at = bench()
    first = long_ago(at)
    at.judge.waiting += [Sample("a", first, 1.0), Sample("loss", 3, 9.0)]
    at.judge.block_over(first, first + 1.0)
    assert at.arrived == [(first, first + 1.0, ["a"]), (first, first + 1.0, ["loss"])]


def test_a_stop_does_not_keep_the_rest_of_its_block_from_being_heard(bench: Callable[..., Bench]) -> None:
    at = bench()
    first = long_ago(at)
    for nth in (0, 1, 2):
        at.judge.waiting.append(Sample("loss", first + nth, 9.0 if nth != 1 else 1.0))
    seen: list[int] = []

    def stops(result: Evaluation, event: Event | None) -> None:
        seen.append(result.step)
        raise StopTraining("stop", rule="loss-high", step=result.step)

    at.judge._found = stops
    with pytest.raises(StopTraining) as stop:
        at.judge.block_over(first + 2, first + 1.0)
    assert seen == [first, first + 1, first + 2]
    assert stop.value.step == first


def test_nothing_is_left_unjudged_behind_a_checkpoint(bench: Callable[..., Bench]) -> None:
    at = bench(("loss",))
    at.at(EventKind.STEP_END, 1, loss=OnDevice(9.0))
    assert at.found == []
    at.at(EventKind.CHECKPOINT_SAVED, 1)
    assert at.found == [(["loss-high"], EventKind.CHECKPOINT_SAVED)]


def test_a_gate_sees_the_samples_before_they_leave_and_may_have_the_host_wait(bench: Callable[..., Bench]) -> None:
    class Gate:
        alarmed = waits = False
        seen: list[list[str]]

        def see(self, samples: Sequence[Sample]) -> None:
            self.seen.append([sample.metric for sample in samples])

    gate, at = Gate(), bench(("loss",))
    gate.seen = []
    at.judge.gate = gate
    at.at(EventKind.BEFORE_UPDATE, 1, loss=OnDevice(9.0))
    assert at.found == []
    at.at(EventKind.STEP_END, 1)
    gate.waits = True
    at.at(EventKind.BEFORE_UPDATE, 2, loss=OnDevice(9.0))
    assert at.found == [(["loss-high"], EventKind.BEFORE_UPDATE)]
    assert gate.seen == [["loss"], ["loss"]]


def test_silence_is_judged_from_another_thread_but_never_beside_the_training_thread(
    bench: Callable[..., Bench],
) -> None:
    at = bench()
    at.at(EventKind.STEP_END, 1, heartbeat=1.0)
    inside: list[int] = []

    def in_training(result: Evaluation, event: Event | None) -> None:
        watchdog = threading.Thread(target=at.judge.silence, args=(60.0, 60.0))
        watchdog.start()
        watchdog.join(0.2)
        inside.append(len(at.found))
        at.judge._found = at._note
        inside.append(int(watchdog.is_alive()))

    at.judge._found = in_training
    at.at(EventKind.STEP_END, 2, loss=9.0)
    assert inside == [0, 1]
    deadline = threading.Event()
    while not at.found and not deadline.wait(0.01):
        pass
    assert at.found == [(["silent"], None)]


def test_what_could_change_the_update_is_what_acting_rules_look_at_with_what_it_is_made_of() -> None:
    host = plugin_host()
    rules = load_rules_for(
        host=host,
        rules={
            "version": 1,
            "external": ["a", "b", "c"],
            "metrics": {"ratio": "a / b"},
            "rules": {
                "acts": {"metric": "ratio", "when": {"above": 1}, "then": ["skip_update"]},
                "only-says": {"metric": "c", "when": {"above": 1}, "then": ["warn"]},
            },
        },
    )
    assert acted_upon(rules.causes, rules.derived, host.registry.actions) == {"ratio", "a", "b"}
