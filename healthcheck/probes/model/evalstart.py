"""Models that are trained in eval mode from their first step on."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.model.modes import sensitive_parts
from healthcheck.probes.names import first_few
from healthcheck.probes.values import on_host
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample

LOOKS = 10
"""Looks in a run; a model that is put into eval mode later is told of by ``modules.in_eval``."""


class EvalStartProbe:
    """Looks in its first steps for a model that nobody ever put into train mode.

    ``from_pretrained`` and many loaders hand out a model in eval mode. Counted are dropout layers in a model that is in
    eval mode as a whole, has nothing frozen and is trained by this optimizer, and batch norm layers in eval mode that
    are trained while their running statistics are still the zeros and ones of their beginning: they normalise nothing.
    A backbone that is frozen or has statistics of its own, and a layer that was switched by itself (what holds it is in
    train mode), are left alone.
    """

    name = "eval-start"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "modules.never_in_train",
            "Dropout and batch norm layers of a trained model that were in eval mode from the start.",
            cost=Cost.HOST,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._looks = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or event.optimizer is None or not demand.due("modules.never_in_train", event.step):
            return ()
        self._looks += 1
        if self._looks >= LOOKS:
            self.rests_until = sys.maxsize
        trained = {id(p) for group in event.optimizer.param_groups for p in group["params"] if p.grad is not None}
        hit = _never_in_train(event.model.named_modules(), trained)

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(hit)}

        return (Sample("modules.never_in_train", event.step, float(len(hit)), detail=facts if hit else None),)


def _never_in_train(modules: Sequence[tuple[str, Any]], trained: set[int]) -> list[str]:
    from torch.nn.modules.batchnorm import _NormBase

    parents = {id(child): parent for _, parent in modules for child in parent.children()}
    found = []
    for part in sensitive_parts(modules):
        if part.module.training or (part.parent is not None and part.parent.training):
            continue
        if isinstance(part.module, _NormBase):
            if part.module.weight is not None and id(part.module.weight) in trained and _is_untouched(part.module):
                found.append(part.name)
            continue
        root = part.module
        while id(root) in parents:
            root = parents[id(root)]
        own = list(root.parameters())
        if not root.training and own and all(id(p) in trained for p in own):
            found.append(part.name)
    return found


def _is_untouched(norm: Any) -> bool:
    """Whether its running statistics are those of a new layer. Unknown on a device, where asking would be a wait."""
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None or not on_host(mean):
        return False
    return not bool(mean.any()) and bool((variance == 1).all())
