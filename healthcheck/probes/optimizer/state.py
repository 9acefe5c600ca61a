"""Is the optimizer's memory still finite? Weights may look well while a moment behind them is lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.kernels.foreach import l2_norms
from healthcheck.probes.names import first_few
from healthcheck.probes.values import is_tensor, optimizer_labels, scalar
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample


class OptimizerStateProbe:
    """Counts state tensors (moments, velocities) with a NaN or infinity: when a rule is due, and at checkpoints."""

    name = "optimizer-state"
    stretchable = ("optimizer.nonfinite",)
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (EventKind.AFTER_UPDATE, EventKind.CHECKPOINT_SAVED)
    only_when_due = (EventKind.AFTER_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "optimizer.nonfinite", "Tensors of the optimizer's state that hold a NaN or infinity.", cost=Cost.DEVICE
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None:
            return ()
        if event.kind is EventKind.CHECKPOINT_SAVED:
            listed = list(enumerate(event.model.optimizers()))
        elif event.optimizer is not None and demand.due("optimizer.nonfinite", event.step):
            listed = [(event.optimizer_index, event.optimizer)]
        else:
            return ()
        return [sample for index, optimizer in listed for sample in self._look(event, index, optimizer)]

    def _look(self, event: Event, index: int, optimizer: Any) -> Iterable[Sample]:
        assert event.model is not None
        names = {id(p): name for name, p in event.model.named_parameters()}
        found = list(_state_tensors(optimizer, names))
        if not found:
            return
        bad = ~l2_norms([tensor for _, tensor in found]).isfinite()

        def facts() -> Mapping[str, Any]:
            hit = [name for (name, _), flag in zip(found, bad.tolist(), strict=True) if flag]
            return {"which": first_few(hit), "tensors": f"{len(hit):,} of {len(found):,} state tensors not finite"}

        labels = optimizer_labels(index)
        yield Sample("optimizer.nonfinite", event.step, scalar(bad.sum()), labels, detail=facts)


def _state_tensors(optimizer: Any, names: Mapping[int, str]) -> Iterable[tuple[str, Any]]:
    """``exp_avg of head.weight`` and its tensor; step counters and integer codes are always finite."""
    for parameter, state in getattr(optimizer, "state", {}).items():
        if not isinstance(state, Mapping):
            continue
        for key, value in state.items():
            if is_tensor(value) and value.dim() and value.numel() and value.is_floating_point():
                yield f"{key} of {names.get(id(parameter), '?')}", value
