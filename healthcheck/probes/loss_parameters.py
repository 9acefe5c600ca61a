"""Parameters of the loss: tensors between the trained model and its loss that get gradients, and that nobody trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.references import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.living import live_objects
from healthcheck.probes.graph import NEUTRAL, all_behind, kind_of
from healthcheck.probes.labels import first_few, where_made
from healthcheck.probes.looks import GraphProbe

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
