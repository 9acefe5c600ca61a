"""Parameters that get gradients and that no optimizer trains: those of the loss, those that are made anew in each forward pass, and those
of a model whose optimizer was given another one's."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.living import live_objects
from healthcheck.probes.graph import NEUTRAL, all_behind, kind_of
from healthcheck.probes.labels import first_few, where_made
from healthcheck.probes.looks import LOOK_SELDOM, GraphProbe, next_look

LOOKS = (3, 20, 60)
"""Backward passes whose graph is looked at."""


_LAYERS = ("Addmm", "Mm", "Bmm", "Convolution", "Embedding", "NativeLayerNorm", "NativeBatchNorm")
"""What turns data into features: behind one of them that is not trained comes a part of a model that is fixed."""


class LossParameterProbe(GraphProbe):
    """Counts leaves of the graph of the loss that are used behind what is trained and are in no optimizer.

    Losses of metric learning have vectors for each class, losses of several tasks their weights, contrastive losses a
    temperature: modules or parameters beside the model, which ``model.parameters()`` leaves out. Left alone are the weights
    of layers (a network that judges what the model makes), a part of the model that holds what is trained, what was given
    a state dict, and what another look does not meet again.
    """

    name = "loss-parameters"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "params.of_loss",
            "Tensors beside the model that its loss uses, that get gradients and are in no optimizer; looked at three times.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._before: list[Any] = []

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event) or event.model is None:
            return ()
        optimizers = event.model.optimizers()
        held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        own = {id(p) for _, p in event.model.named_parameters()}
        found = [leaf for leaf in _behind_trained(event.loss_graph, held) if id(leaf) not in own]
        known = [ref() for ref in self._before]
        self._before = [weak(leaf) for leaf in found]
        again = [leaf for leaf in found if any(leaf is before for before in known)]
        again = again and _not_loaded(again, event)
        if not held:
            return ()
        names = [name for name, _ in _owners(again)] if again else []
        place: dict[str, str] = {}
        for _, owner in _owners(again) if again else ():
            place = place or (where_made(event, owner) if owner is not None else {})

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(names)} | place

        return (Sample("params.of_loss", event.step, float(len(again)), detail=facts if again else None),)


def _behind_trained(root: Any, held: set[int]) -> list[Any]:
    """Leaves that are in no optimizer and are combined with what was calculated by an optimizer's tensors."""
    calculated: set[int] = set()
    """Nodes that an optimizer's tensors went into, but for those tensors themselves."""
    parameters: set[int] = set()
    """An optimizer's tensors, also turned or looked at in another shape."""
    below: dict[int, set[int]] = {}
    """Of each node that was made of leaves alone, without a layer: these leaves."""
    as_it_is: set[int] = set()
    """Nodes that are a leaf itself, perhaps turned: read by a layer it is that layer's weight, in a network that judges."""
    leaves: dict[int, Any] = {}
    found: dict[int, Any] = {}
    for node in all_behind(root):
        kind, key = kind_of(node), id(node)
        if kind == "AccumulateGrad":
            if id(node.variable) in held:
                parameters.add(key)
            else:
                leaves[key] = node.variable
                below[key] = {key}
                as_it_is.add(key)
            continue
        parents = [id(parent) for parent, _ in node.next_functions if parent is not None]
        if kind in NEUTRAL and not parameters.isdisjoint(parents):
            parameters.add(key)
            continue
        behind = not calculated.isdisjoint(parents)
        if kind in NEUTRAL and not as_it_is.isdisjoint(parents):
            as_it_is.add(key)
        used = [parent for parent in parents if not (kind in _LAYERS and parent in as_it_is)]
        own = set[int]().union(*(below.get(parent, ()) for parent in used))
        if behind:
            found.update((leaf, leaves[leaf]) for leaf in own)
        if behind or not parameters.isdisjoint(parents):
            calculated.add(key)
        elif own and kind not in _LAYERS:
            below[key] = own
    return list(found.values())


def _owners(leaves: list[Any]) -> list[tuple[str, Any]]:
    """The name of each and the module that holds it, if one does."""
    found: dict[int, tuple[str, Any]] = {}
    wanted = {id(leaf) for leaf in leaves}
    for module in live_objects("Module"):
        for name, parameter in (getattr(module, "_parameters", None) or {}).items():
            if id(parameter) in wanted:
                found.setdefault(id(parameter), (f"{type(module).__name__}.{name}", module))
    return [found.get(id(leaf), (f"a tensor of shape {tuple(leaf.shape)}", None)) for leaf in leaves]


def _not_loaded(leaves: list[Any], event: Event) -> list[Any]:
    """Without those of modules that were given a state dict, or that a library loads from a file."""
    loaded = event.run.loaded if event.run is not None else ()
    given = {id(p) for module in loaded for p in module.parameters()}
    kept = []
    for leaf, (_, owner) in zip(leaves, _owners(leaves), strict=True):
        library = owner is not None and type(owner).__module__.partition(".")[0] in (
            "transformers",
            "diffusers",
            "timm",
        )
        if id(leaf) not in given and not library:
            kept.append(leaf)
    return kept


# --------------------------------------------------------------------------------------------------
# Parameters that are made anew in each forward pass.


FRESH_LOOKS = (2, 3, 4, 50, 51)
"""Backward passes whose whole graph is looked at: two in a row are compared."""


class FreshParameterProbe(GraphProbe):
    """Compares the parameters behind the loss of two passes in a row.

    Counted are those of torch's class for parameters that no optimizer holds, where as many of the same shapes stood in
    the pass before, and are gone by now. A layer that is built inside ``forward`` leaves such; it is random in each step.
    Left alone is a graph without any tensor that is trained: that of a copy which lives for one step (meta-learning).
    """

    name = "fresh-parameters"
    looks_at = FRESH_LOOKS
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


# --------------------------------------------------------------------------------------------------
# An optimizer that was given the parameters of another one's model, so that its own model has none.


SEARCHES = 4
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
        if optimizer is None or not demand.due(_KEY, step) or self._looks >= SEARCHES:
            return ()
        if event.model is not None and len(event.model.optimizers()) < 2:  # a new one ends the rest
            self.rests_until = next_look(step, REST, LOOK_SELDOM)
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
        if self._looks >= SEARCHES:
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
