"""What watching costs is a metric like any other: own host time against training time."""

from __future__ import annotations

import time

import pytest

from healthcheck.assembly import open_session
from healthcheck.core.events import Event, EventKind
from healthcheck.core.runinfo import RunFacts
from healthcheck.core.samples import Sample
from healthcheck.probes.steps import WARMUP, WINDOW, OwnCostProbe
from healthcheck.run.ending import Ending

RULES = {"version": 1, "rules": {"own": {"metric": "monitor.overhead", "when": {"above": 1000}}}}


class Wanted:
    def wants(self, key: str) -> bool:
        return True

    def due(self, key: str, step: int) -> bool:
        return True


def test_one_value_a_window_is_the_share_of_that_window_alone() -> None:
    probe, samples = OwnCostProbe(), list[Sample]()
    for step in range(1, WARMUP + 3 * WINDOW + 1):
        slow = step > WARMUP + WINDOW  # own time of 10 % of a second, 20 % later; the start costs far more
        own = 7.0 + 0.1 * step + (0.1 * (step - WARMUP - WINDOW) if slow else 0.0)
        run = RunFacts(active_seconds=float(step), own_seconds=own)
        samples += probe.sample(Event(EventKind.STEP_END, step, run=run), Wanted())
    assert [s.step for s in samples] == [WARMUP + WINDOW * k for k in (1, 2, 3)]
    assert [s.value for s in samples] == pytest.approx([0.1, 0.2, 0.2])
    assert samples[1].detail is not None
    assert samples[1].detail() == {"per_step": "200.00 ms a step"}


@pytest.mark.usefixtures("virtual_time")
def test_a_slow_listener_is_part_of_the_cost_and_the_training_is_not() -> None:
    session = open_session(target="t", rules=RULES, console=False, record=False)
    session.on("step_start", lambda event: time.sleep(0.003))
    for step in range(1, WARMUP + WINDOW + 1):
        session.emit(Event(EventKind.STEP_START, step))
        time.sleep(0.001)
        session.emit(Event(EventKind.STEP_END, step))
    session.finish(Ending())
    ((_, share),) = session.history("monitor.overhead")
    assert share == pytest.approx(0.75)
