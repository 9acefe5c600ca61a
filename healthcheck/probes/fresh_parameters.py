"""Parameters that are made anew in each forward pass, and so never trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.references import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.living import live_objects
from healthcheck.probes.graph import all_behind
from healthcheck.probes.looks import GraphProbe

LOOKS = (2, 3, 4, 50, 51)
"""Backward passes whose whole graph is looked at: two in a row are compared."""


class FreshParameterProbe(GraphProbe):
    """Compares the parameters behind the loss of two passes in a row.

    Counted are those of torch's class for parameters that no optimizer holds, where as many of the same shapes stood in
    the pass before, and are gone by now. A layer that is built inside ``forward`` leaves such; it is random in each step.
    Left alone is a graph without any tensor that is trained: that of a copy which lives for one step (meta-learning).
    """

    name = "fresh-parameters"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "params.fresh",
            "Parameters behind the loss that were made since the last pass, in place of others of the same shapes.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._before: list[tuple[tuple[int, ...], Callable[[], Any]]] = []
        """Shapes of the parameters in the last graph that no optimizer held, and where they were."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event) or event.model is None:
            return ()
        from torch import nn

        optimizers = event.model.optimizers()
        held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        held |= {id(p) for _, p in event.model.named_parameters()}
        leaves: list[Any] = [getattr(node, "variable", None) for node in all_behind(event.loss_graph)]
        leaves = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)]
        strange = [leaf for leaf in leaves if id(leaf) not in held]
        gone = Counter(shape for shape, ref in self._before if ref() is None)
        fresh = list((Counter(tuple(leaf.shape) for leaf in strange) & gone).elements())
        if fresh and (len(strange) == len(leaves) or _held_elsewhere(strange)):
            fresh = []
        compared, self._before = bool(self._before) or not strange, [(tuple(p.shape), weak(p)) for p in strange]
        if not compared:
            return ()

        def facts() -> Mapping[str, Any]:
            return {"shapes": ", ".join(map(str, fresh[:4])) + (" and more" if len(fresh) > 4 else "")}

        return (Sample("params.fresh", event.step, float(len(fresh)), detail=facts if fresh else None),)


def _held_elsewhere(parameters: Iterable[Any]) -> bool:
    """Whether an optimizer that has not stepped yet holds one of them: that of an inner loop, say."""
    held = {id(p) for o in live_objects("Optimizer") for g in getattr(o, "param_groups", ()) for p in g["params"]}
    return any(id(p) in held for p in parameters)
