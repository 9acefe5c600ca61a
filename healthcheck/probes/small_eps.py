"""An optimizer's epsilon that half precision cannot hold."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.probes.labels import optimizer_labels, where_made

ADAPTIVE = frozenset({"Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "Adagrad"})
"""Optimizers of torch that divide by the root of an average and add ``eps`` to it, in the type of the weights."""


class SmallEpsilonProbe:
    """Looks once at each optimizer: is its ``eps`` still above zero in the type of the weights that it updates?

    Float16 holds nothing below 3e-8: the usual 1e-8 is 0 there, and where the average of squares is 0 as well, which it is
    for gradients below 0.008, the update is a division by zero. The fused kernels calculate in float32.
    """

    name = "small-epsilon"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric("optimizer.eps_lost", "Weight tensors in whose type the optimizer's eps rounds to 0.", cost=Cost.HOST),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._seen: set[int] = set()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        optimizer, index = event.optimizer, event.optimizer_index
        if optimizer is None or index in self._seen:
            return ()
        self._seen.add(index)
        self.rests_until = sys.maxsize
        lost = [
            (group["eps"], p) for group in _unfused(optimizer) for p in group["params"] if _is_lost(group["eps"], p)
        ]

        place = where_made(event, optimizer)

        def facts() -> Mapping[str, Any]:
            eps, parameter = lost[0]
            kind = str(parameter.dtype).removeprefix("torch.")
            return {"eps": f"{type(optimizer).__name__} has {eps:g}, which is 0 in {kind}"} | place

        value, labels = float(len(lost)), optimizer_labels(index)
        return (Sample("optimizer.eps_lost", event.step, value, labels, detail=facts if lost else None),)


def _unfused(optimizer: Any) -> list[Any]:
    if not any(c.__module__.startswith("torch.optim.") and c.__name__ in ADAPTIVE for c in type(optimizer).__mro__):
        return []
    return [group for group in optimizer.param_groups if not group.get("fused") and type(group.get("eps")) is float]


def _is_lost(eps: float, parameter: Any) -> bool:
    import torch

    if parameter.dtype is not torch.float16 or not parameter.requires_grad or eps <= 0:
        return False
    return not float(torch.tensor(eps, dtype=parameter.dtype))
