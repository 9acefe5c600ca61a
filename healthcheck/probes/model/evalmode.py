"""Evaluations that change the model: batch statistics that go on moving on held-out data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.names import first_few
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Cost, Metric, Sample


class EvaluationModeProbe:
    """Counts normalisation layers that updated their running statistics during an evaluation.

    Proof that the very model that is trained ran in train mode: its counters moved, which their version numbers tell
    without a look at their values. Dropout leaves no trace, and a copy that is evaluated instead (an average of the
    weights) none on the original. Layers without momentum are left out: that is how averaged models are given new
    statistics on purpose.
    """

    name = "evaluation-mode"
    listens_to: tuple[EventKind, ...] = (EventKind.EVAL_START, EventKind.EVAL_STEP)
    provides: tuple[Metric, ...] = (
        Metric(
            "modules.train_in_eval",
            "Normalisation layers whose running statistics moved between two batches of an evaluation.",
            cost=Cost.HOST,
            needs=("evaluation",),
        ),
    )

    def __init__(self) -> None:
        self._before: list[tuple[str, Any, int]] | None = None
        self._batches = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None:
            return ()
        if event.kind is EventKind.EVAL_START:
            self._batches = 0
            return ()
        # From the first batch to the second: the end of an evaluation may be noticed only at the next backward pass.
        self._batches += 1
        if self._batches == 1:
            self._before = [(name, weak(module), _version(module)) for name, module in _counting(event.model)]
        if self._batches != 2 or not self._before:
            return ()
        before, self._before = self._before, None
        looked = [(name, module(), version) for name, module, version in before]
        hit = [name for name, module, version in looked if module is not None and _version(module) != version]

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(hit), "modules": f"{len(hit):,} of {len(looked):,} such layers"}

        return (Sample("modules.train_in_eval", event.step, float(len(hit)), phase="eval", detail=facts),)


def _counting(model: Any) -> Iterable[tuple[str, Any]]:
    from torch.nn.modules.batchnorm import _NormBase

    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.num_batches_tracked is not None and module.momentum is not None:
            yield name, module


def _version(module: Any) -> int:
    counter = module.num_batches_tracked
    return int(counter._version) if counter is not None else -1
