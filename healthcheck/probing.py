"""Running the probes that some rule wants, and no others; what they yield waits here to be judged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from healthcheck.dispatch import Dispatch
from healthcheck.engine.demand import RuleDemand
from healthcheck.events import Event, EventKind
from healthcheck.protocols import Probe
from healthcheck.samples import Sample, series_name

HISTORY = 200
"""Values per series kept for evidence."""
HISTORY_SERIES = 512


@dataclass(slots=True)
class ProbeCost:
    """Host time of one probe, for the report and the overhead budget."""

    calls: int = 0
    ns: int = 0


class ProbeBoard:
    """The probes of one session.

    :param demand: what the rules want; probes that provide none of it are left out.
    :param active: seconds of active training, the time of every sample.
    """

    def __init__(
        self, probes: Mapping[str, Probe], demand: RuleDemand, dispatch: Dispatch, active: Callable[[], float]
    ) -> None:
        self.probes = probes
        self.demand = demand
        self.dispatch = dispatch
        self.active = active
        self.by_kind: dict[EventKind, list[Probe]] = {}
        self.cost: dict[str, ProbeCost] = {}
        self.pending: list[Sample] = []
        self._declared = {metric.key for probe in probes.values() for metric in probe.provides}
        self.plan()

    def plan(self) -> None:
        """Wire the wanted probes to their events."""
        self.by_kind = {}
        for name, probe in self.probes.items():
            if self.dispatch.is_quarantined(name) or not self._wanted(probe):
                continue
            self.cost.setdefault(name, ProbeCost())
            plan = getattr(probe, "plan", None)
            if plan is not None:
                try:
                    plan(self.demand)
                except (Exception, SystemExit) as error:
                    self.dispatch.failed(name, "plan", 0, error)
                    continue
            for kind in probe.listens_to:
                self.by_kind.setdefault(kind, []).append(probe)

    def _wanted(self, probe: Probe) -> bool:
        """Whether some rule asks for a metric that this probe provides, by name or by prefix."""
        if any(self.demand.wants(metric.key) for metric in probe.provides):
            return True
        prefixes = tuple(getattr(probe, "provides_prefixes", ()))
        return (
            any(key not in self._declared and key.startswith(prefixes) for key in self.demand.every)
            if prefixes
            else False
        )

    def sample(self, event: Event) -> None:
        """Let every probe of this event's kind look; errors are kept with the probe's name."""
        for probe in self.by_kind.get(event.kind, ()):
            began = perf_counter_ns()
            try:
                made = probe.sample(event, self.demand)
                if made is not None:
                    at = self.active()
                    for sample in made:
                        sample.time = at
                        self.pending.append(sample)
            except (Exception, SystemExit) as error:
                self.dispatch.failed(probe.name, event.kind.value, event.step, error)
                if self.dispatch.is_quarantined(probe.name):
                    self.plan()
            cost = self.cost[probe.name]
            cost.calls += 1
            cost.ns += perf_counter_ns() - began

    def take(self) -> list[Sample]:
        """The samples since the last call."""
        pending, self.pending = self.pending, []
        return pending

    def state_dict(self) -> dict[str, Any]:
        """What the probes must keep over a resume, by probe name."""
        wired = {p.name: p for listed in self.by_kind.values() for p in listed}
        return {name: p.state_dict() for name, p in wired.items() if hasattr(p, "state_dict")}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for name, state in saved.items():
            probe = self.probes.get(name)
            if probe is not None and hasattr(probe, "load_state_dict"):
                probe.load_state_dict(state)

    def close(self, guard: Callable[[Callable[[], Any]], None]) -> None:
        for probe in {id(p): p for listed in self.by_kind.values() for p in listed}.values():
            close = getattr(probe, "close", None)
            if close is not None:
                guard(close)


class History:
    """The last values of every series, for evidence and for people who ask."""

    def __init__(self) -> None:
        self.values: dict[str, deque[tuple[int, float]]] = {}

    def remember(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            name = sample.metric if not sample.labels else series_name(sample.metric, sample.labels)
            kept = self.values.get(name)
            if kept is None:
                if len(self.values) >= HISTORY_SERIES:
                    continue
                kept = self.values[name] = deque(maxlen=HISTORY)
            kept.append((sample.step, sample.value))

    def __call__(self, series: str, n: int = HISTORY) -> list[tuple[int, float]]:
        """The last ``n`` values of a series as ``(step, value)``, oldest first."""
        return list(self.values.get(series, ()))[-n:]
