"""Recompilations and graph breaks, counted by torch.compile itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from healthcheck.events import Event, EventKind
from healthcheck.protocols import Demand
from healthcheck.samples import Metric, Sample

LOOK_EVERY = 5
"""Steps between two looks while nothing was compiled."""


class CompilationProbe:
    """Reads Dynamo's counters. Says nothing while nothing was compiled, and never loads Dynamo."""

    name = "compilation"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    only_when_due = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric("compile.recompiles", "Compilations of a frame beyond its first, since the start.", needs=("compile",)),
        Metric(
            "compile.limit_hits",
            "Functions that Dynamo gave up on because they were compiled anew too often, since the start.",
            needs=("compile",),
        ),
        Metric("compile.graph_breaks", "Graph breaks met while compiling, since the start.", needs=("compile",)),
    )

    def __init__(self) -> None:
        self.rests_until = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        frames = sys.modules.get("torch._dynamo.convert_frame")
        counts = getattr(frames, "FRAME_COMPILE_COUNTER", None)
        if not counts:
            self.rests_until = event.step + LOOK_EVERY
            return ()
        samples = [Sample("compile.recompiles", event.step, float(sum(n - 1 for n in list(counts.values()))))]
        utilities = sys.modules.get("torch._dynamo.utils")
        counters = getattr(utilities, "counters", None)
        if counters is not None:
            gave_up = [
                n for reason, n in counters.get("unimplemented", {}).items() if "recompile limit" in reason.lower()
            ]
            samples.append(Sample("compile.limit_hits", event.step, float(sum(gave_up))))
            breaks = sum(counters["graph_break"].values()) if "graph_break" in counters else 0
            samples.append(Sample("compile.graph_breaks", event.step, float(breaks)))
        return samples
