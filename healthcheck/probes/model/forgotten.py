"""Parameters that get gradients, that no optimizer holds, and of which something says that they were meant to train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.model.attributes import made_of_parameters
from healthcheck.probes.model.seen import SeenModules
from healthcheck.probes.names import first_few
from healthcheck.probes.values import optimizer_labels
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Cost, Metric, Sample

_LISTED = "in a plain list or dict of a module: use nn.ModuleList, nn.ModuleDict or nn.ParameterList"
_UNFROZEN = "unfrozen after the optimizer was built: optimizer.add_param_group, or build it again"
_MADE = "a tensor of its own that is no parameter of the module: wrap the result, as in nn.Parameter(torch.randn(n).to(device))"
_SIBLING = (
    "the smaller part of layers whose larger part an optimizer holds: look at the filters of its parameter groups"
)

Listed = list[tuple[str, Callable[[], Any]]]


class ForgottenParameterProbe:
    """That no optimizer holds a tensor proves no mistake: whoever trains a head need not freeze the rest.

    Four things do. The tensor is kept in a plain list or dict of a module of the model, where ``parameters()`` does
    not find it. It is an attribute of a module and was calculated, as ``nn.Parameter(...).cuda()`` is:
    the parameter itself is nowhere, and gets the gradients. It was frozen when first seen and is not any more. Or it is
    the bias of a layer whose weight is trained (the smaller part of a module, the larger part of which an optimizer
    holds).
    """

    name = "forgotten"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "params.forgotten",
            "Tensors with a gradient and without optimizer that were meant to train: listed, unfrozen, or a layer's rest.",
            cost=Cost.HOST,
        ),
    )

    def __init__(self) -> None:
        self._frozen: dict[int, Callable[[], Any]] = {}
        self._modules = SeenModules()
        self._listed: Listed = []
        self._made: Listed = []

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or event.optimizer is None or not demand.due("params.forgotten", event.step):
            return ()
        optimizers = (*event.model.optimizers(), event.optimizer)
        held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        modules, named = event.model.named_modules(), event.model.named_parameters()
        if self._modules.changed(modules):
            known = {id(p) for _, p in named}
            self._listed = [(name, weak(p)) for name, p in _listed(modules) if id(p) not in known]
            self._made = [(name, weak(p)) for name, p in made_of_parameters(modules) if id(p) not in known]
        outside = [(name, p) for name, p in named if id(p) not in held]
        found: dict[int, tuple[str, str]] = {}
        for listed, why in ((self._listed, _LISTED), (self._made, _MADE)):
            for name, ref in listed:
                parameter = ref()
                if parameter is not None and id(parameter) not in held and _trains(parameter):
                    found[id(parameter)] = (name, why)
        for name, p in outside:
            before = self._frozen.get(id(p))
            if before is not None and before() is p and _trains(p):
                found[id(p)] = (name, _UNFROZEN)
            elif not p.requires_grad:
                self._frozen[id(p)] = weak(p)
        if outside:
            names = {id(p): name for name, p in outside if _trains(p)}
            for parameter in _smaller_parts(modules, held, names):
                found.setdefault(id(parameter), (names[id(parameter)], _SIBLING))

        def facts() -> Mapping[str, Any]:
            reasons = Counter(reason for _, reason in found.values())
            why = "; ".join(f"{count:,} {reason}" for reason, count in reasons.items())
            return {"which": first_few(name for name, _ in found.values()), "why": why}

        labels = optimizer_labels(event.optimizer_index)
        return (Sample("params.forgotten", event.step, float(len(found)), labels, detail=facts),)


def _trains(parameter: Any) -> bool:
    return bool(parameter.requires_grad and parameter.grad is not None and parameter.numel())


def _smaller_parts(modules: Iterable[tuple[str, Any]], held: set[int], names: Mapping[int, str]) -> Iterator[Any]:
    """Of each module's own parameters those in ``names``, if optimizers hold more than these make up."""
    for _, module in modules:
        own = [p for p in getattr(module, "_parameters", {}).values() if p is not None]
        rest = [p for p in own if id(p) in names]
        if rest and sum(p.numel() for p in own if id(p) in held) > sum(p.numel() for p in rest):
            yield from rest


def _listed(modules: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Parameters in plain lists, tuples and dicts that hang at a module, with the path to each."""
    for name, module in modules:
        for key, value in vars(module).items():
            if not key.startswith("_") and isinstance(value, (list, tuple, dict)):
                yield from _inside(value, f"{name}.{key}" if name else key)


def _inside(value: Any, path: str, depth: int = 2) -> Iterator[tuple[str, Any]]:
    from torch import nn

    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        where = f"{path}.{key}"
        if isinstance(item, nn.Parameter):
            yield where, item
        elif isinstance(item, nn.Module):
            yield from ((f"{where}.{name}", p) for name, p in item.named_parameters())
        elif depth > 1 and isinstance(item, (list, tuple, dict)):
            yield from _inside(item, where, depth - 1)
