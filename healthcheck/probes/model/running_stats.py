"""Running statistics of normalisation layers: one bad batch spoils them for every evaluation to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.kernels.foreach import l2_norms
from healthcheck.probes.model.seen import SeenModules
from healthcheck.probes.names import first_few
from healthcheck.probes.values import scalar
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Cost, Metric, Sample

_NAMES = ("running_mean", "running_var")


class RunningStatisticsProbe:
    """Counts running means and variances with a NaN or infinity: when a rule is due, and before a checkpoint is trusted.

    A batch with a NaN that the loop skips (``if not isfinite(loss): continue``) has already gone through the forward
    pass: in train mode nothing shows, in eval mode every output is NaN. Other buffers may hold infinities on purpose,
    as masks of attention do.
    """

    name = "running-statistics"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END, EventKind.CHECKPOINT_SAVED)
    only_when_due = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric(
            "buffers.nonfinite",
            "Running statistics of normalisation layers that hold a NaN or infinity.",
            cost=Cost.DEVICE,
            needs=("running statistics",),
        ),
    )

    def __init__(self) -> None:
        self._modules = SeenModules()
        self._layers: list[tuple[str, Callable[[], Any]]] = []

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        saved = event.kind is EventKind.CHECKPOINT_SAVED
        if event.model is None or not demand.wants("buffers.nonfinite"):
            return ()
        if not saved and not demand.due("buffers.nonfinite", event.step):
            return ()
        modules = event.model.named_modules()
        if self._modules.changed(modules):
            self._layers = [(name, weak(module)) for name, module in modules if _statistics(module)]
        alive = ((name, ref()) for name, ref in self._layers)
        named = [
            (f"{name}.{key}" if name else key, tensor)
            for name, module in alive
            if module is not None
            for key, tensor in _statistics(module).items()
        ]
        if not named:
            return ()
        bad = ~l2_norms([tensor for _, tensor in named]).isfinite()

        def facts() -> Mapping[str, Any]:
            hit = [name for (name, _), flag in zip(named, bad.tolist(), strict=True) if flag]
            return {"which": first_few(hit), "buffers": f"{len(hit):,} of {len(named):,} running statistics"}

        return (Sample("buffers.nonfinite", event.step, scalar(bad.sum()), detail=facts),)


def _statistics(module: Any) -> dict[str, Any]:
    buffers = getattr(module, "_buffers", {})
    found = {key: buffers.get(key) for key in _NAMES}
    return {key: t for key, t in found.items() if t is not None and t.is_floating_point() and t.device.type != "meta"}
