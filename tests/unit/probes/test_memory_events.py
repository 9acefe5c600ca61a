"""Memory per epoch, per event and per step."""

from __future__ import annotations

from typing import Any

import pytest

from healthcheck.core.events import Event, EventKind
from healthcheck.core.runinfo import RunFacts
from healthcheck.engine.lookups import RuleDemand
from healthcheck.probes.memory import EPOCH_METRICS, MemoryEpochProbe, MemoryEventProbe


class Device:
    """An allocator that says what it is told to."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0

    def statistics(self) -> dict[str, int]:
        self.peak = max(self.peak, self.allocated)
        return {"allocated": self.allocated, "peak": self.peak}


def cleaned(times: int) -> RunFacts:
    return RunFacts(actions_done={"cleanup": times})


def play(probe: Any, device: Device, *script: tuple[EventKind, int, dict[str, Any]]) -> list[Any]:
    demand = RuleDemand()
    demand.every = dict.fromkeys((*EPOCH_METRICS, "memory.at[]", "memory.step_growth"), 1)
    found = []
    for step, (kind, allocated, facts) in enumerate(script, start=1):
        device.allocated = allocated
        found += list(probe.sample(Event(kind, step, **facts), demand))
    return found


def test_an_epoch_gives_start_end_peak_delta_and_cleanups() -> None:
    device, times = Device(), iter([10.0, 25.0])
    probe = MemoryEpochProbe(device, lambda: next(times))  # type: ignore[arg-type]
    samples = play(
        probe,
        device,
        (EventKind.EPOCH_START, 100, {"epoch": 3.0, "run": cleaned(2)}),
        (EventKind.STEP_END, 180, {"run": cleaned(2)}),
        (EventKind.EPOCH_END, 130, {"epoch": 4.0, "run": cleaned(3)}),
    )
    assert {s.metric: s.value for s in samples} == {
        "memory.epoch": 3.0,
        "memory.epoch_start": 100.0,
        "memory.epoch_end": 130.0,
        "memory.epoch_peak": 180.0,
        "memory.epoch_delta": 30.0,
        "memory.epoch_cleanups": 1.0,
        "memory.epoch_began": 10.0,
        "memory.epoch_ended": 25.0,
    }


def test_the_peak_of_an_earlier_epoch_is_not_that_of_this_one() -> None:
    device = Device()
    device.peak = 1000
    samples = play(
        MemoryEpochProbe(device),  # type: ignore[arg-type]
        device,
        (EventKind.EPOCH_START, 100, {"epoch": 1.0}),
        (EventKind.STEP_END, 150, {}),
        (EventKind.EPOCH_END, 120, {}),
    )
    assert next(s.value for s in samples if s.metric == "memory.epoch_peak") == 150.0


def test_an_epoch_that_did_not_begin_is_not_made_up() -> None:
    device = Device()
    assert play(MemoryEpochProbe(device), device, (EventKind.EPOCH_END, 120, {"epoch": 1.0})) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", MemoryEventProbe.listens_to)
def test_every_event_has_its_own_series(kind: EventKind) -> None:
    device = Device()
    (sample,) = play(MemoryEventProbe(device), device, (kind, 70, {}))  # type: ignore[arg-type]
    assert (sample.metric, sample.labels, sample.value) == ("memory.at", (("event", kind.value),), 70.0)


def test_growth_of_a_step_is_its_end_less_its_start() -> None:
    device = Device()
    samples = play(
        MemoryEventProbe(device),  # type: ignore[arg-type]
        device,
        (EventKind.STEP_START, 70, {}),
        (EventKind.STEP_END, 95, {}),
    )
    assert [s.value for s in samples if s.metric == "memory.step_growth"] == [25.0]
