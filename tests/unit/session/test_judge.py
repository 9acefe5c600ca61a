"""The judge on its own: what is posted when, what is handed out, and which thread may judge what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.core.events import Event, EventKind
from healthcheck.core.samples import Sample
from healthcheck.engine.engine import Engine, Evaluation
from healthcheck.run.judge import Judge, acted_upon

RULES: dict[str, Any] = {
    "loss-high": {"metric": "loss", "when": {"above": 5}},
    "silent": {"metric": "heartbeat", "when": {"stale": "10s"}},
}


class Box:
    """A mailbox that remembers what was posted, and keeps values of ``on_device`` metrics back until they are read."""

    def __init__(self, on_device: Sequence[str] = ()) -> None:
        self.posts: list[tuple[int, list[str]]] = []
        self.oldest: int | None = None
        self._on_device = on_device
        self._arrived: list[Sample] = []
        self._late: list[Sample] = []

    def post(self, step: int, samples: Sequence[Sample]) -> None:
        self.posts.append((step, [sample.metric for sample in samples]))
        for sample in samples:
            late = sample.metric in self._on_device
            (self._late if late else self._arrived).append(sample)
            if late:
                self.oldest = step

    def ready(self) -> list[Sample]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def drain(self) -> list[Sample]:
        late, self._late, self.oldest = self._late, [], None
        for sample in late:
            sample.value = float(sample.value)
        return [*self.ready(), *late]


class OnDevice:
    """A number on a device, as far as the judge can tell: a 0-dim tensor without torch."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, number: float) -> None:
        self.number = number

    def __float__(self) -> float:
        return self.number


class Bench:
    """A judge with a real engine, and what it hands over."""

    def __init__(self, box: Box, acting: Sequence[str] = ()) -> None:
        host = plugin_host()
        rules = load_rules_for(host=host, rules={"version": 1, "external": ["heartbeat", "a", "b"], "rules": RULES})
        self.box = box
        self.arrived: list[tuple[int, float, list[str]]] = []
        self.found: list[tuple[list[str], EventKind | None]] = []
        self.judge = Judge(
            Engine(rules), box, acting=lambda gated: frozenset(acting), arrived=self._hand_out, found=self._note
        )

    def _hand_out(self, step: int, at: float, samples: list[Sample]) -> None:
        self.arrived.append((step, at, [sample.metric for sample in samples]))

    def _note(self, result: Evaluation, event: Event | None) -> None:
        self.found.append(([alert.rule for alert in result.alerts], None if event is None else event.kind))

    def at(self, kind: EventKind, step: int, **values: Any) -> None:
        self.judge.waiting += [Sample(metric, step, value) for metric, value in values.items()]
        self.judge(Event(kind, step), float(step))


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return lambda *given, **options: Bench(Box(*given), **options)


def test_samples_are_posted_handed_out_and_judged_at_the_end_of_the_step(bench: Callable[..., Bench]) -> None:
    at = bench()
    at.at(EventKind.STEP_END, 3, loss=9.0, a=1.0)
    assert at.box.posts == [(3, ["loss", "a"])]
    assert at.arrived == [(3, 3.0, ["loss", "a"])]
    assert at.found == [(["loss-high"], EventKind.STEP_END)]
    assert at.judge.waiting == []


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


def test_values_that_come_late_are_judged_at_every_second_step(bench: Callable[..., Bench]) -> None:
    at = bench(("b",))
    for step in (1, 2, 3, 4):
        at.at(EventKind.STEP_END, step, a=1.0, b=OnDevice(2.0))
    assert [step for step, _, _ in at.arrived] == [2, 4]


def test_ranks_that_decide_together_judge_every_step_and_exchange_after_it(bench: Callable[..., Bench]) -> None:
    at, exchanged = bench(("b",)), []
    at.judge.exchange = lambda step: exchanged.append((step, len(at.arrived)))
    for step in (1, 2, 3):
        at.at(EventKind.STEP_END, step, a=1.0, b=OnDevice(2.0))
    assert exchanged == [(1, 1), (2, 2), (3, 3)]


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
    assert acted_upon(rules.rules, rules.derived, host.registry.actions) == {"ratio", "a", "b"}
