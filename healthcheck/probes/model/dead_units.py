"""Units of ReLU-like layers that output only zeros. Needs forward hooks, so only if asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.model.modulehooks import Hook, ModuleHooks, largest_of, out_of_graphs
from healthcheck.probes.values import on_host, scalar
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

BATCHES = 10
"""Training passes over which a unit must stay silent."""

_KINDS = ("ReLU", "ReLU6", "Threshold", "Hardtanh")


_NEEDS = ("layers outside compiled graphs",)


class DeadUnitProbe:
    """Keeps, per layer, which units were above zero at least once in the last ten passes.

    Units are channels of a convolution (dimension 1 of three and more) and features otherwise
    (the last). Sees ``nn.ReLU`` and its like; a function call such as ``relu(x)`` has no module to
    hook. Hooks are put in place at the first event that shows the model, and removed at the end.
    """

    name = "dead-units"
    listens_to: tuple[EventKind, ...] = (
        EventKind.TRAIN_START,
        EventKind.STEP_START,
        EventKind.LOSS,
        EventKind.STEP_END,
    )
    provides: tuple[Metric, ...] = (
        Metric(
            "units.dead",
            f"Part of the worst ReLU layer's units silent for {BATCHES} passes.",
            "fraction",
            Cost.DEVICE,
            needs=_NEEDS,
        ),
        Metric(
            "units.dead",
            f"Part of one ReLU layer's units silent for {BATCHES} passes.",
            "fraction",
            Cost.DEVICE,
            labels=("module",),
            needs=_NEEDS,
        ),
    )

    def __init__(self) -> None:
        self._wanted = False
        self._hooks = ModuleHooks(self._choose)
        self._alive: dict[str, Any] = {}
        self._passes: dict[str, int] = {}

    def plan(self, demand: Demand) -> None:
        self._wanted = demand.wants("units.dead") or demand.wants("units.dead[]")
        if not self._wanted:
            self.close()

    def close(self) -> None:
        """Remove all hooks."""
        self._hooks.close()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if self._wanted and event.model is not None:
            self._hooks.follow(event.model.named_modules())
        if event.kind is not EventKind.STEP_END:
            return ()
        full = [name for name, passes in self._passes.items() if passes >= BATCHES]
        if not full:
            return ()
        return list(self._samples(event, demand, full))

    def _samples(self, event: Event, demand: Demand, full: list[str]) -> Iterable[Sample]:
        shares = {name: 1.0 - self._alive.pop(name).float().mean() for name in full}
        for name in full:
            del self._passes[name]
        if demand.wants("units.dead"):

            def facts() -> Mapping[str, Any]:
                name = max(shares, key=lambda n: float(shares[n]))
                return {"which": f"{name}, {float(shares[name]):.0%} of its units"}

            yield Sample("units.dead", event.step, scalar(largest_of(shares)), detail=facts)
        if demand.wants("units.dead[]"):
            for name, share in shares.items():
                value = float(share) if on_host(share) else share
                yield Sample("units.dead", event.step, value, (("module", name),))

    def _choose(self, modules: Sequence[tuple[str, Any]]) -> Iterable[tuple[Any, Hook]]:
        for name, module in modules:
            if type(module).__name__ in _KINDS and getattr(module, "min_val", 0.0) >= 0.0:
                yield module, self._hook(name or "model")

    def _hook(self, name: str) -> Any:
        import torch

        def look(module: Any, given: Any, output: Any) -> None:
            # Only passes that train: evaluation and no_grad passes see other data.
            if not torch.is_tensor(output) or not module.training or not torch.is_grad_enabled() or output.dim() < 2:
                return
            unit = 1 if output.dim() > 3 else output.dim() - 1
            alive = (output.detach() > 0).any(dim=tuple(d for d in range(output.dim()) if d != unit))
            known = self._alive.get(name)
            if known is None or known.shape != alive.shape:
                self._alive[name], self._passes[name] = alive, 1
            else:
                self._alive[name] = known | alive
                self._passes[name] += 1

        return out_of_graphs(look)
