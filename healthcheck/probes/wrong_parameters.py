"""An optimizer that was given the parameters of another one's model, so that its own model has none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.references import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.living import live_objects
from healthcheck.probes.labels import first_few, where_made
from healthcheck.probes.looks import next_look

LOOKS = 4
"""Searches among all that lives, at the most: some 20 ms each."""
MOST = 8
"""Optimizers among which a pair is sought."""
RECENT = 10
"""Updates within which both optimizers must have made a step."""
REST = 50
"""Steps between two looks for a second optimizer."""
_KEY = "params.wrong_optimizer"


class WrongParametersProbe:
    """Looks for a model without an optimizer where two optimizers that take turns hold the same tensors.

    Two optimizers for the same tensors may be meant so (two objectives), and so may a model that gets gradients and is in
    none (a fixed network behind the one that is trained). Both at once are the typing error
    ``Adam(discriminator.parameters())`` for the optimizer of the generator. Counted are tensors of modules of which no
    living optimizer holds any, in train mode, that got new gradients between two looks. Only where two optimizers share
    all that one of them holds is anything searched.
    """

    name = "wrong-parameters"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            _KEY,
            "Tensors of a model with gradients and without an optimizer, while two optimizers take turns at the same tensors.",
            cost=Cost.HOST,
            needs=("two optimizers",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._held: dict[int, tuple[Callable[[], Any], frozenset[int], int]] = {}
        """Of each optimizer, by its number: the tensors that it holds, and the step of its last update that was seen."""
        self._looks = 0
        self._waiting: list[tuple[Callable[[], Any], Callable[[], Any], int]] = []
        """Tensors found at the last look, with their gradients and how often these had been written."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        optimizer, index, step = event.optimizer, event.optimizer_index, event.step
        if optimizer is None or not demand.due(_KEY, step) or self._looks >= LOOKS:
            return ()
        if event.model is not None and len(event.model.optimizers()) < 2:  # a new one ends the rest
            self.rests_until = next_look(step, REST)
            return ()
        held: frozenset[int] = frozenset().union(*(map(id, group["params"]) for group in optimizer.param_groups))
        self._held[index] = weak(optimizer), held, step
        # Once a step, when the last of them is about to step; who trains hundreds of models at once has no such pair.
        if index != max(self._held) or not 2 <= len(self._held) <= MOST:
            return ()
        twins = self._twins(step)
        if not twins:
            return (Sample(_KEY, step, 0.0),)
        self._looks += 1
        if self._looks >= LOOKS:
            self.rests_until = sys.maxsize
        strangers = _without_optimizer()
        before, self._waiting = self._waiting, [(weak(p), weak(p.grad), p.grad._version) for _, p in strangers]
        written = {id(p) for ref, grad, version in before if (p := ref()) is not None and _written(p, grad(), version)}
        found = [(name, p) for name, p in strangers if id(p) in written]
        place = where_made(event, twins[-1])

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(name for name, _ in found)} | place

        return (Sample(_KEY, step, float(len(found)), detail=facts if found else None),)

    def _twins(self, step: int) -> list[Any]:
        """Two optimizers that made updates just now, one of which holds nothing that the other does not."""
        recent = [(ref(), held) for ref, held, last in self._held.values() if step - last <= RECENT and held]
        for (first, one), (second, other) in combinations(recent, 2):
            if first is not None and second is not None and (one <= other or other <= one):
                return [first, second]
        return []


def _written(parameter: Any, gradient: Any, version: int) -> bool:
    """Whether it has another gradient than this one in this version."""
    return parameter.grad is not None and (parameter.grad is not gradient or parameter.grad._version != version)


def _without_optimizer() -> Sequence[tuple[str, Any]]:
    """Tensors with gradients of the outermost living modules in train mode of which no living optimizer holds any."""
    optimizers, modules = live_objects("Optimizer"), live_objects("Module")
    held = {id(p) for o in optimizers for group in vars(o).get("param_groups") or () for p in group["params"]}
    inner = {id(child) for module in modules for child in vars(module).get("_modules", {}).values()}
    found: list[tuple[str, Any]] = []
    for module in modules:
        if id(module) in inner or "_parameters" not in vars(module) or not module.training:
            continue
        named = list(module.named_parameters())
        if named and not any(id(p) in held for _, p in named):
            found += [(name, p) for name, p in named if p.requires_grad and p.grad is not None]
    return found
