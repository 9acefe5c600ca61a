"""Which parameters are trained by which optimizer: tensors without gradient, without optimizer, orphaned or forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from healthcheck.core.events import Event, EventKind, ModelView
from healthcheck.core.protocols import Demand
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.living import live_objects
from healthcheck.device.tensors import GRADIENT, IS_NONE, is_tensor
from healthcheck.probes.graph import parents_of
from healthcheck.probes.labels import first_few, in_groups, optimizer_labels, where_in_model, where_made
from healthcheck.probes.looks import LOOK_SELDOM, SeenModules, next_look
from healthcheck.probes.traits import poolers_of_libraries, routed_experts

PATIENCE = 5
"""Updates in a row without gradient before a tensor counts."""
TURNS = 50
"""The same where tensors take turns, as heads and experts do; three times its longest pause so far, if that is more."""
OPTIMIZER_PATIENCE = 20
"""Updates before a tensor counts as having no optimizer: the second one of a GAN may come late."""


LOOK_EVERY = 10
"""Steps after which it is looked again which parameters no optimizer holds."""
SETTLED = 50
"""Steps after which such a look is enough once in so many, where optimizers hold them all."""

SEARCHES = 3
"""How often the process is searched for the model that runs, where nothing in the optimizer gets a gradient."""

_KEYS = ("params.no_gradient", "params.not_in_optimizer", "params.optimizer_orphans")


class WiringProbe:
    """Looks at ``grad is None`` and at parameter groups; touches no values.

    What was frozen with ``requires_grad=False`` is never counted.
    """

    name = "wiring"
    stretchable = ("params.no_gradient", "params.not_in_optimizer", "params.optimizer_orphans")
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "params.no_gradient",
            f"Trainable tensors in the optimizer without a gradient in the last {PATIENCE} updates, or the last {TURNS} "
            "where tensors take turns.",
            cost=Cost.HOST,
        ),
        Metric(
            "params.not_in_optimizer",
            f"Tensors that got gradients in {OPTIMIZER_PATIENCE} updates in a row and are in no optimizer.",
            cost=Cost.HOST,
        ),
        Metric(
            "params.optimizer_orphans",
            "Trainable tensors in the optimizer that get no gradient and belong to no module that runs.",
            cost=Cost.HOST,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._absent: dict[int, int] = {}
        self._pauses: dict[int, int] = {}
        """Longest run of updates without a gradient after which a tensor got one."""
        self._ever: set[int] = set()
        self._stray: dict[int, int] = {}
        self._updates: dict[int, int] = {}
        self._step = 0
        """Step of the last look."""
        self._all_seen: dict[int, int] = {}
        """Number of parameters of an optimizer all of which had a gradient at the last look, else -1."""
        self._held_by: Any = None
        self._look_at = 0
        self._outside: list[tuple[str, Callable[[], Any]]] = []
        self._modules = SeenModules()
        self._inside: set[int] = set()
        self._searches = SEARCHES
        self._elsewhere: list[Callable[[], Any]] = []
        """Parameters that train in a module of which no optimizer holds anything."""
        self._optimizer: dict[int, Callable[[], Any]] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or event.optimizer is None:
            return ()
        index = event.optimizer_index
        passed, self._step = max(1, event.step - self._step), event.step
        params = [p for group in event.optimizer.param_groups for p in group["params"]]
        known = self._optimizer.get(index)
        same = known is not None and known() is event.optimizer
        if same and self._all_seen.get(index) == len(params) and not any(map(IS_NONE, map(GRADIENT, params))):
            # Nothing is absent and nothing was: what is known of each parameter stays true, also over a rest.
            self._updates[index] += passed
            stray = self._count_stray(event)
            if self._updates[index] > OPTIMIZER_PATIENCE and not self._outside:
                self.rests_until = demand.next_due(_KEYS, event.step)
            if self._updates[index] < PATIENCE:
                return ()
            if not self._outside:
                return self._nothing_amiss(event, demand)
            return list(self._samples(event, demand, [p for p in params if p.requires_grad and p.numel()], stray))
        own = [p for p in params if p.requires_grad and p.numel()]
        if not same:
            self._optimizer[index] = weak(event.optimizer)
            self._updates[index] = 0
            self._ever.difference_update(id(p) for p in own)  # ids of a model that is gone may be used again
            for parameter in own:
                self._absent.pop(id(parameter), None)
                self._pauses.pop(id(parameter), None)
        self._updates[index] += 1
        for parameter in own:
            key = id(parameter)
            if parameter.grad is None:
                self._absent[key] = self._absent.get(key, 0) + 1
            else:
                if pause := self._absent.get(key, 0):
                    self._pauses[key] = max(pause, self._pauses.get(key, 0))
                self._absent[key] = 0
                self._ever.add(key)
        self._all_seen[index] = len(params) if all(self._absent[id(p)] == 0 for p in own) else -1
        stray = self._count_stray(event)
        if self._updates[index] < PATIENCE:
            return ()
        return list(self._samples(event, demand, own, stray))

    def _nothing_amiss(self, event: Event, demand: Demand) -> list[Sample]:
        """Every tensor has its gradient and its optimizer: there is nobody to look for."""
        due = [key for key in _KEYS if demand.due(key, event.step)]
        if self._updates[event.optimizer_index] < OPTIMIZER_PATIENCE:
            due = [key for key in due if key != "params.not_in_optimizer"]
        labels = optimizer_labels(event.optimizer_index)
        return [Sample(key, event.step, 0.0, labels) for key in due]

    def _count_stray(self, event: Event) -> list[tuple[str, Any]]:
        """Parameters that got a gradient although no optimizer seen so far holds them."""
        assert event.model is not None
        looks = self._held_by is None or event.step >= self._look_at
        if not looks and not self._outside:
            return []
        optimizers = (*event.model.optimizers(), event.optimizer)
        held_by = tuple((id(o), *(len(g["params"]) for g in o.param_groups)) for o in optimizers)
        if looks or held_by != self._held_by:
            held = {id(p) for o in optimizers for g in o.param_groups for p in g["params"]}
            named = event.model.named_parameters()
            self._outside = [(name, weak(p)) for name, p in named if id(p) not in held]
            self._held_by = held_by
            often = self._outside or event.step < SETTLED
            self._look_at = event.step + LOOK_EVERY if often else next_look(event.step, SETTLED, LOOK_SELDOM)
        outside = ((name, ref()) for name, ref in self._outside)
        stray = [(name, p) for name, p in outside if p is not None and p.requires_grad and p.grad is not None]
        self._stray = {id(p): self._stray.get(id(p), 0) + 1 for _, p in stray}
        return stray

    def _samples(
        self, event: Event, demand: Demand, own: Sequence[Any], stray: list[tuple[str, Any]]
    ) -> Iterable[Sample]:
        assert event.model is not None
        if not any(demand.due(key, event.step) for key in _KEYS):
            return
        named = event.model.named_parameters()
        labels, step = optimizer_labels(event.optimizer_index), event.step
        name_of = {id(p): name for name, p in named}

        def names(params: Iterable[Any]) -> list[str]:
            return [name_of.get(id(p), "?") for p in params]

        never = [p for p in own if id(p) not in self._ever]
        orphans, twins = self._orphans(event, never, stray, nothing_trains=len(never) == len(own))
        strangers = set(map(id, orphans))
        if demand.due("params.no_gradient", step):
            # The tensors of another model are a matter of their own.
            hit = [p for p in self._without_gradient(own, name_of) if id(p) not in strangers]
            if hit:  # experts that a router leaves out are judged by the rule for routers
                idle = _beside_trained_experts(event.model, self._ever)
                hit = [p for p in hit if id(p) not in idle]
            if hit:
                spare = poolers_of_libraries(event.model)
                hit = [p for p in hit if id(p) not in spare or id(p) in self._ever]
            lacking = [p for p in hit if id(p) not in self._ever]
            place = where_in_model(event, names(hit)) if hit else {}

            def no_gradient() -> Mapping[str, Any]:
                frozen = sum(not p.requires_grad for _, p in named)
                facts = {"which": in_groups(names(hit), names(own)), "never": f"{len(lacking):,} never got one"}
                facts |= place
                return facts | ({"frozen": f"{frozen:,} frozen on purpose: ignored"} if frozen else {})

            yield Sample("params.no_gradient", step, float(len(hit)), labels, detail=no_gradient)
        if demand.due("params.not_in_optimizer", step) and self._updates[event.optimizer_index] >= OPTIMIZER_PATIENCE:
            lost = [name for name, p in stray if self._stray[id(p)] >= OPTIMIZER_PATIENCE]
            everyone = [name for name, p in named if p.requires_grad]
            built = where_made(event, event.optimizer)
            yield Sample(
                "params.not_in_optimizer",
                step,
                float(len(lost)),
                labels,
                detail=lambda: {"which": in_groups(lost, everyone)} | built,
            )
        if demand.due("params.optimizer_orphans", step):
            orphans = orphans + self._replaced(event, own, stray)
            held_at = where_made(event, event.optimizer)

            def orphaned() -> Mapping[str, Any]:
                facts = {"which": in_groups(names(orphans), names(own))} | held_at
                if twins:
                    facts["twins"] = f"{twins:,} tensors of the same shapes got gradients and are in no optimizer"
                return facts

            yield Sample("params.optimizer_orphans", step, float(len(orphans)), labels, detail=orphaned)

    def _without_gradient(self, own: Sequence[Any], name_of: Mapping[int, str]) -> list[Any]:
        """Those that wait for a gradient for longer than taking turns explains.

        Of parts that take turns, one may never have its own: an expert that no token was sent to, say.
        """
        # Who has paused before may be pausing again: experts and heads that take turns.
        in_turns = [id(p) for p in own if id(p) in self._pauses]
        if not in_turns:
            return [p for p in own if self._absent[id(p)] >= PATIENCE]
        waiting = [p for p in own if self._absent[id(p)] >= max(TURNS, 3 * self._pauses.get(id(p), 0))]
        rows = {row for key in in_turns for row in _rows(name_of.get(key, ""))} if waiting else set()
        return [p for p in waiting if rows.isdisjoint(_rows(name_of.get(id(p), "")))]

    def _orphans(
        self, event: Event, never: Sequence[Any], stray: list[tuple[str, Any]], *, nothing_trains: bool
    ) -> tuple[list[Any], int]:
        """Of tensors that never got a gradient: those outside all modules, or with a twin that did.

        A twin has the same shape, got gradients all the time and is in no optimizer: the model was
        built again after the optimizer. A part of the model that is merely unused has none. Where no
        module is known, an optimizer of which not one tensor ever got a gradient holds orphans only.
        """
        # Each stray tensor is the twin of one orphan at most.
        shapes = Counter(tuple(p.shape) for _, p in stray if self._stray[id(p)] >= PATIENCE)
        inside = self._in_modules(event)
        if nothing_trains and not shapes:
            if not self._elsewhere and self._searches:
                self._searches -= 1
                self._elsewhere = [weak(p) for p in _trained_elsewhere(inside | set(map(id, never)))]
            shapes = Counter(tuple(p.shape) for ref in self._elsewhere if (p := ref()) is not None)
        orphans, twins = [], 0
        for parameter in never:
            shape = tuple(parameter.shape)
            if shapes[shape] > 0:
                shapes[shape] -= 1
                twins += 1
                orphans.append(parameter)
            elif id(parameter) not in inside and (inside or nothing_trains):
                orphans.append(parameter)
        return orphans, twins

    def _replaced(self, event: Event, own: Sequence[Any], stray: list[tuple[str, Any]]) -> list[Any]:
        """Tensors of layers that were trained and are no part of the model any more, while others are that nobody trains."""
        if not any(self._stray[id(p)] >= PATIENCE for _, p in stray):
            return []
        gone = [p for p in own if id(p) in self._ever and self._absent[id(p)] >= PATIENCE]
        inside = self._in_modules(event, anew=True) if gone else set()
        return [p for p in gone if id(p) not in inside] if inside else []

    def _in_modules(self, event: Event, *, anew: bool = False) -> set[int]:
        assert event.model is not None
        modules = event.model.named_modules()
        if self._modules.changed(modules) or anew:
            self._inside = {id(p) for _, m in modules for p in getattr(m, "_parameters", {}).values() if p is not None}
        return self._inside


def _trained_elsewhere(known: set[int]) -> list[Any]:
    """Parameters with gradients of all modules in this process, but for those that are known already."""
    found = {id(p): p for m in live_objects("Module") for p in vars(m).get("_parameters", {}).values() if p is not None}
    return [p for key, p in found.items() if key not in known and p.requires_grad and p.grad is not None]


def _beside_trained_experts(model: ModelView, trained: set[int]) -> set[int]:
    """Parameters of experts in layers of which some expert has been trained."""
    layers = [{id(p) for p in experts.parameters()} for _, experts in routed_experts(model)]
    return {key for own in layers if not own.isdisjoint(trained) for key in own}


def _rows(name: str) -> set[str]:
    """The rows of equal parts that a tensor stands in: ``experts.*.weight`` for ``experts.3.weight``."""
    parts = name.split(".")
    return {".".join([*parts[:i], "*", *parts[i + 1 :]]) for i, part in enumerate(parts) if part.isdigit()}


NODES = 16
"""Operations between such a tensor and its parameter that are followed: a move to a device or another type, a view."""


def made_of_parameters(modules: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """``(path of the attribute, parameter)`` for ``self.w = nn.Parameter(...).to(device)`` and its like.

    Such a tensor was calculated once, from a parameter that the module does not know. Only what torch marks as a
    parameter counts: other tensors with a gradient may be inputs that are optimised by hand.
    """
    from torch import nn

    for name, module in modules:
        for key, value in vars(module).items():
            if is_tensor(value) and value.grad_fn is not None:
                for leaf in _leaves(value.grad_fn):
                    if isinstance(leaf, nn.Parameter):
                        yield f"{name}.{key}" if name else key, leaf


def _leaves(node: Any) -> Iterator[Any]:
    waiting, seen = [node], 0
    while waiting and seen < NODES:
        node = waiting.pop()
        seen += 1
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        waiting += parents_of(node)


_LISTED = "in a plain list or dict of a module: use nn.ModuleList, nn.ModuleDict or nn.ParameterList"
_UNFROZEN = "unfrozen after the optimizer was built: optimizer.add_param_group, or build it again"
_MADE = "a separate tensor that is not a parameter of the module: wrap the result, as in nn.Parameter(torch.randn(n).to(device))"
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
            "Tensors with a gradient and no optimizer that look meant to train: in a plain list, unfrozen later, or part of a trained layer.",
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

        place = where_in_model(event, (name for name, _ in found.values())) or where_made(event, event.optimizer)

        def facts() -> Mapping[str, Any]:
            reasons = Counter(reason for _, reason in found.values())
            why = "; ".join(f"{count:,} {reason}" for reason, count in reasons.items())
            return {"which": first_few(name for name, _ in found.values()), "why": why} | place

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
