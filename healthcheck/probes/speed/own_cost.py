"""What watching itself costs, for a rule that says so."""

from __future__ import annotations

from collections.abc import Iterable

from healthcheck.events import Event, EventKind
from healthcheck.protocols import Demand
from healthcheck.samples import Metric, Sample

WINDOW = 50
"""Steps over which one value is taken: single steps are noise."""
WARMUP = 10
"""Steps that are left out at the start: they name parameters, compile kernels and fill tables."""


class OwnCostProbe:
    """Our own host time against the time of the training, one value in :data:`WINDOW` steps.

    Host time only: kernels that we launch are not in it. On an accelerator that is kept busy the host
    runs ahead, and the training loses less than this.
    """

    name = "own-cost"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric(
            "monitor.overhead",
            f"Our own host time as a part of the training time, over the last {WINDOW} steps.",
            "fraction",
        ),
    )

    def __init__(self) -> None:
        self._steps = 0
        self._before: tuple[float, float] | None = None

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        self._steps += 1
        if (self._steps - WARMUP) % WINDOW:
            return ()
        if event.run is None:
            return ()
        own, active = now = event.run.own_seconds, event.run.active_seconds
        before, self._before = self._before, now
        if before is None or active <= before[1]:
            return ()
        share = (own - before[0]) / (active - before[1])
        facts = {"per_step": f"{(own - before[0]) / WINDOW * 1e3:.2f} ms a step"}
        return (Sample("monitor.overhead", event.step, share, detail=lambda: facts),)
