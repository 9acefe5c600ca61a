"""Parts of the model that are in eval mode while they are trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.model.seen import SeenModules
from healthcheck.probes.names import first_few
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Metric, Sample


@dataclass(slots=True)
class _Part:
    name: str
    module: Any
    parent: Any
    """The module that holds it, or None for a root."""
    trained: bool = False
    """Whether a training pass met it in train mode before."""


class ModeProbe:
    """Looks at the modules that behave differently in eval mode: dropout, normalisation, RNN dropout.

    Counted are those in eval mode during a training pass that were in train mode in an earlier
    one, whose parent is in eval mode with them and trains something. A forgotten ``model.train()``
    after an evaluation looks like this. Not counted: backbones that were never in train mode or
    have nothing to train, and layers switched one by one on purpose (their parent still trains).
    """

    name = "modes"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE, EventKind.STEP_END)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "modules.in_eval",
            "Dropout and normalisation layers left in eval mode in a training pass.",
            cost=Cost.HOST,
        ),
    )

    def __init__(self) -> None:
        self._modules = SeenModules()
        self._parts: list[_Part] = []
        self._hit: list[_Part] | None = None
        self._given = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.LOSS:
            if event.phase == "train" and event.model is not None and demand.due("modules.in_eval", event.step):
                self._look(event)
            return ()
        if self._hit is None or self._given == event.step:
            return ()
        if event.model is not None and self._modules.changed(event.model.named_modules()):
            # Another model trains by now; what was seen at the loss was its predecessor.
            self._rebuild(event.model.named_modules())
            self._hit = None
            return ()
        hit, self._hit, self._given = self._hit, None, event.step
        total = len(self._parts)

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(p.name for p in hit), "modules": f"{len(hit):,} of {total:,} such layers"}

        return (Sample("modules.in_eval", event.step, float(len(hit)), detail=facts),)

    def _look(self, event: Event) -> None:
        assert event.model is not None
        modules = event.model.named_modules()
        if self._modules.changed(modules):
            self._rebuild(modules)
        hit = []
        for part in self._parts:
            if part.module.training:
                part.trained = True
            elif part.trained and (part.parent is None or not part.parent.training) and _trains(part):
                hit.append(part)
        self._hit = hit

    def _rebuild(self, modules: Sequence[tuple[str, Any]]) -> None:
        before = [p.module for p in self._parts if p.trained]
        self._parts = list(sensitive_parts(modules))
        for part in self._parts:
            part.trained = any(part.module is module for module in before)


def sensitive_parts(modules: Iterable[tuple[str, Any]]) -> Iterable[_Part]:
    """Modules whose forward depends on the mode, each with the module that holds it."""
    from torch import nn
    from torch.nn.modules.batchnorm import _NormBase
    from torch.nn.modules.dropout import _DropoutNd

    modules = list(modules)
    parents = {id(child): parent for _, parent in modules for child in parent.children()}
    for name, module in modules:
        if isinstance(module, _NormBase):
            sensitive = bool(module.track_running_stats)
        elif isinstance(module, _DropoutNd):
            sensitive = module.p > 0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            sensitive = module.dropout > 0
        else:
            sensitive = False
        if sensitive:
            yield _Part(name, module, parents.get(id(module)))


def _trains(part: _Part) -> bool:
    """Whether the part, or what surrounds it, has anything to train."""
    own = list(part.module.parameters(recurse=True))
    if own:
        return any(p.requires_grad for p in own)
    return part.parent is None or any(p.requires_grad for p in part.parent.parameters())
