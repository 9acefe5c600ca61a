"""Gradients of a ``DistributedDataParallel`` model that no rank shares with the others."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

UPDATES = 5
"""Updates during which the wrapper's passes are counted."""


class UnsyncedGradientProbe:
    """Counts tensors of a DDP model that get gradients while the wrapper itself is never called.

    Gradients are averaged over the ranks in a backward pass that follows a pass through the wrapper. Who calls
    ``model.module(...)``, or a method of it, trains each rank on its own. Looked at once, over the first few updates; the
    hook on the wrapper is taken off then. A compiled model is not judged: torch passes by hooks that it has not compiled.
    """

    name = "unsynced"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "grads.unsynced",
            f"Tensors of a DDP model with gradients that are not shared, after {UPDATES} updates without a pass through it.",
            cost=Cost.HOST,
            needs=("DistributedDataParallel on several ranks",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._passes = 0
        self._updates = 0
        self._handles: list[Any] = []

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or self.rests_until:
            return ()
        modules = [module for _, module in event.model.named_modules()]
        wrappers = [module for module in modules if _shares(module)]
        if not wrappers or any(map(_is_compiled, modules)):
            self.rests_until = sys.maxsize
            return ()
        self._updates += 1
        if self._updates == 1:
            self._handles = [wrapper.register_forward_pre_hook(self._passed) for wrapper in wrappers]
        if self._updates <= UPDATES:
            return ()
        self.close()
        self.rests_until = sys.maxsize
        alone = 0 if self._passes else sum(p.grad is not None for wrapper in wrappers for p in wrapper.parameters())
        facts = {"wrapper": f"not called in {UPDATES} updates"}
        return (Sample("grads.unsynced", event.step, float(alone), detail=lambda: facts),)

    def _passed(self, module: Any, given: Any) -> None:
        self._passes += 1

    def close(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()


def _shares(module: Any) -> bool:
    """Whether this is DDP over several ranks. By name: a run on one rank need not import ``torch.distributed``."""
    if not any(cls.__name__ == "DistributedDataParallel" for cls in type(module).__mro__):
        return False
    group = getattr(module, "process_group", None)
    return group is not None and group.size() > 1


def _is_compiled(module: Any) -> bool:
    kinds = {cls.__name__ for cls in type(module).__mro__}
    return "OptimizedModule" in kinds or getattr(module, "_compiled_call_impl", None) is not None
