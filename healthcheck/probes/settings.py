"""Settings without effect: attributes that were set on an optimizer, a module or a parameter, and that nobody reads; an epsilon
that half precision cannot hold."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.probes.labels import first_few, optimizer_labels, where_made
from healthcheck.probes.looks import LOOK_EVERY, LOOK_SELDOM, Lead, next_look

REST = 50
"""Steps between two looks for the optimizer of another training."""
LOOKS = 6
"""Looks in a run; what is set in a loop is set by then."""
MOMENTUM, DROPPED = 0.9, 0.9
"""From which on a momentum of batch norm, and a probability of dropout, are taken for another library's."""
_RATES = ("lr", "learning_rate")
_TYPING_ERRORS = ("require_grad", "requires_gradient", "required_grad", "require_grads", "requires_grads")


class IgnoredSettingProbe:
    """Looks for attributes that look like a setting and are none.

    ``optimizer.lr = 1e-4``: a torch optimizer reads its parameter groups. ``module.requires_grad = False``: a module has no
    such attribute, its parameters have. ``parameter.require_grad = False``: a typing error that Python does not see. Only
    what contradicts the values in use is counted, and optimizers of torch itself: others may read attributes of their own.
    """

    name = "ignored-settings"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "settings.ignored",
            "Attributes set on optimizers, modules and parameters that nobody reads, and that contradict what is in use.",
            cost=Cost.HOST,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._looks = 0
        self._last = 0
        """Step of the last look: of several optimizers, the first that steps in it is asked. A second training of one process
        has another one."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or event.optimizer is None or event.step == self._last:
            return ()
        if not demand.due("settings.ignored", event.step):
            return ()
        self._last = event.step
        self._looks += 1
        self.rests_until = sys.maxsize if self._looks >= LOOKS else event.step + LOOK_EVERY * self._looks
        optimizers = {id(o): o for o in (*event.model.optimizers(), event.optimizer)}.values()
        found = [(said, optimizer) for optimizer in optimizers for said in _of_optimizer(optimizer)]
        found += [(said, module) for said, module in _of_modules(event.model.named_modules())]
        place = where_made(event, found[0][1]) if found else {}

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(said for said, _ in found)} | place

        return (Sample("settings.ignored", event.step, float(len(found)), detail=facts if found else None),)


class UnusualSettingProbe:
    """Looks for settings that mean something else in the library that they come from, once, early in a run.

    ``BatchNorm(momentum=0.99)`` is Keras' way to say 0.01: in torch it makes the running statistics those of the last batch.
    ``Dropout(keep_prob)`` drops what should be kept. ``betas=(0.999, 0.9)`` is the wrong way round. ``[layer] * 6`` is a list of
    six names for one layer.
    """

    name = "unusual-settings"
    rests_for_all = True
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric("optimizer.betas_swapped", "Optimizers whose first beta is larger than the second.", cost=Cost.HOST),
        Metric(
            "modules.momentum_of_keras",
            f"Batch norm layers that are trained and whose momentum is {MOMENTUM:g} or more.",
            cost=Cost.HOST,
        ),
        Metric(
            "modules.keep_probability",
            f"Dropout layers that drop {DROPPED:.0%} of their values or more.",
            cost=Cost.HOST,
        ),
        Metric(
            "modules.repeated",
            "Lists of layers that hold one and the same layer with weights more than once.",
            cost=Cost.HOST,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 3
        self._lead = Lead()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers whose training was looked at."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or event.optimizer is None or not self._lead.of(event) or event.step < 3:
            return ()
        self.rests_until = next_look(event.step, REST, LOOK_SELDOM)
        if event.optimizer in self._known:
            return ()
        self._known.add(event.optimizer)
        from torch.nn.modules.batchnorm import _NormBase
        from torch.nn.modules.dropout import _DropoutNd

        modules = event.model.named_modules()
        optimizers = {id(o): o for o in (*event.model.optimizers(), event.optimizer)}.values()
        swapped = [
            f"{type(o).__name__}, betas={tuple(g['betas'])}"
            for o in optimizers
            for g in o.param_groups[:1]
            if isinstance(g.get("betas"), (tuple, list))
            and len(g["betas"]) == 2
            and g["betas"][0] > g["betas"][1] > 0.5
        ]
        norms = [
            (name or type(m).__name__, m)
            for name, m in modules
            if isinstance(m, _NormBase)
            and m.track_running_stats
            and m.momentum is not None
            and MOMENTUM <= m.momentum < 1
        ]
        drops = [
            (name or type(m).__name__, m) for name, m in modules if isinstance(m, _DropoutNd) and DROPPED <= m.p < 1
        ]
        lists = [(name or type(m).__name__, m) for name, m in modules if _repeats(m)]
        samples = []
        for key, names, things in (
            ("modules.repeated", [name for name, _ in lists], [m for _, m in lists]),
            ("optimizer.betas_swapped", swapped, list(optimizers)),
            ("modules.momentum_of_keras", [name for name, _ in norms], [m for _, m in norms]),
            ("modules.keep_probability", [name for name, _ in drops], [m for _, m in drops]),
        ):
            facts = {"which": first_few(names)} | (where_made(event, things[0]) if names else {})
            detail = (lambda facts=facts: facts) if names else None
            samples.append(Sample(key, event.step, float(len(names)), detail=detail))
        return samples


class SamplerProbe:
    """Looks at the weights of torch's ``WeightedRandomSampler``, early in a run and once more.

    Without replacement, and as many draws as there are samples, each sample comes once whatever its weight. With fewer weights than
    the data set has samples, one for each class say, all that come after the first few never come.
    """

    name = "samplers"
    rests_for_all = True
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "sampler.mistaken",
            "Loaders with a WeightedRandomSampler whose weights change nothing, or leave out most of the data set.",
            cost=Cost.HOST,
            needs=("a loader with a WeightedRandomSampler",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = SAMPLER_LOOKS[0]
        self._looks = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.run is None or self._looks >= len(SAMPLER_LOOKS) or event.step < SAMPLER_LOOKS[self._looks]:
            return ()
        self._looks += 1
        self.rests_until = SAMPLER_LOOKS[self._looks] if self._looks < len(SAMPLER_LOOKS) else sys.maxsize
        samplers = [(thing, getattr(thing, "sampler", None)) for thing in event.run.places.things()]
        weighted = [(loader, s) for loader, s in samplers if type(s).__name__ == "WeightedRandomSampler"]
        if not weighted:
            return ()
        found = [(said, loader) for loader, s in weighted for said in _of_sampler(s, loader)]
        place = where_made(event, found[0][1]) if found else {}

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(said for said, _ in found)} | place

        return (Sample("sampler.mistaken", event.step, float(len(found)), detail=facts if found else None),)


SAMPLER_LOOKS = (3, 200)
"""Steps at which samplers are looked at."""


def _of_sampler(sampler: Any, loader: Any) -> Iterator[str]:
    weights: Any = getattr(sampler, "weights", None)
    try:
        given, samples = len(weights), len(loader.dataset)
    except Exception:  # of a script's own kind, or a data set without a length
        return
    if 2 * given <= samples:
        yield f"{given:,} weights for {samples:,} samples: those after the first {given:,} never come"
    elif not sampler.replacement and sampler.num_samples >= given and len(set(map(float, weights[:SOME]))) > 1:
        yield f"replacement=False and {sampler.num_samples:,} draws of {given:,} samples: each comes once, whatever its weight"


SOME = 1000
"""Weights that are compared."""


def _repeats(module: Any) -> bool:
    """Whether a list of modules holds one that has weights twice or more. Sequences that are called as a whole may repeat one."""
    if type(module).__name__ != "ModuleList":
        return False
    with_weights = [
        id(child) for child in module._modules.values() if child is not None and any(True for _ in child.parameters())
    ]
    return len(with_weights) > len(set(with_weights))


def _of_optimizer(optimizer: Any) -> Iterator[str]:
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    groups = optimizer.param_groups
    rates = [group.get("lr") for group in groups]
    own = vars(optimizer)
    for name in {*_RATES, *optimizer.defaults} & own.keys():
        value = own[name]
        used = rates if name in _RATES else [group.get(name) for group in groups]
        if isinstance(value, (int, float)) and all(isinstance(u, (int, float)) and u != value for u in used):
            yield f"optimizer.{name} = {value:.3g}, while its parameter groups have {used[0]:.3g}"
    for group in groups:
        value = group.get("learning_rate")
        if isinstance(value, (int, float)) and isinstance(group.get("lr"), (int, float)) and value != group["lr"]:
            yield f"param_groups[...]['learning_rate'] = {value:.3g}, while 'lr' is {group['lr']:.3g}"
            return


def _of_modules(modules: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for name, module in modules:
        label = name or type(module).__name__
        for key in ("requires_grad", *_TYPING_ERRORS):
            value = vars(module).get(key)
            if isinstance(value, bool) and any(p.requires_grad is not value for p in module.parameters()):
                yield f"{label}.{key} = {value}", module
        for own, parameter in vars(module).get("_parameters", {}).items():
            given = getattr(parameter, "__dict__", None) or {}
            for key in _TYPING_ERRORS:
                if isinstance(given.get(key), bool) and given[key] is not parameter.requires_grad:
                    yield f"{label}.{own}.{key} = {given[key]}", module


# --------------------------------------------------------------------------------------------------
# An epsilon that half precision cannot hold.


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
        if optimizer is None:
            return ()
        self.rests_until = sys.maxsize
        if index in self._seen:
            return ()
        self._seen.add(index)
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
