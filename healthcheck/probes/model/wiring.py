"""Which parameters are trained by whom: tensors without gradient, without optimizer, or orphaned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.model.seen import SeenModules
from healthcheck.probes.names import in_groups
from healthcheck.probes.values import GRADIENT, IS_NONE, optimizer_labels
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Cost, Metric, Sample

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
            self._look_at = event.step + (LOOK_EVERY if self._outside or event.step < SETTLED else SETTLED)
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

        if demand.due("params.no_gradient", step):
            hit = self._without_gradient(own, name_of)
            never = [p for p in hit if id(p) not in self._ever]

            def no_gradient() -> Mapping[str, Any]:
                frozen = sum(not p.requires_grad for _, p in named)
                facts = {"which": in_groups(names(hit), names(own)), "never": f"{len(never):,} never got one"}
                return facts | ({"frozen": f"{frozen:,} frozen on purpose: ignored"} if frozen else {})

            yield Sample("params.no_gradient", step, float(len(hit)), labels, detail=no_gradient)
        if demand.due("params.not_in_optimizer", step) and self._updates[event.optimizer_index] >= OPTIMIZER_PATIENCE:
            lost = [name for name, p in stray if self._stray[id(p)] >= OPTIMIZER_PATIENCE]
            everyone = [name for name, p in named if p.requires_grad]
            yield Sample(
                "params.not_in_optimizer",
                step,
                float(len(lost)),
                labels,
                detail=lambda: {"which": in_groups(lost, everyone)},
            )
        if demand.due("params.optimizer_orphans", step):
            never = [p for p in own if id(p) not in self._ever]
            orphans, twins = self._orphans(event, never, stray, nothing_trains=len(never) == len(own))
            orphans += self._replaced(event, own, stray)

            def orphaned() -> Mapping[str, Any]:
                facts = {"which": in_groups(names(orphans), names(own))}
                if twins:
                    facts["twins"] = f"{twins:,} tensors of the same shapes got gradients and are in no optimizer"
                return facts

            yield Sample("params.optimizer_orphans", step, float(len(orphans)), labels, detail=orphaned)

    def _without_gradient(self, own: Sequence[Any], name_of: Mapping[int, str]) -> list[Any]:
        """Those that wait for a gradient for longer than taking turns explains.

        Of parts that take turns, one may never have its own: an expert that no token was sent to, say.
        """
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
        shapes = Counter(tuple(p.shape) for _, p in stray if self._stray[id(p)] >= PATIENCE)
        inside = self._in_modules(event)
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


def _rows(name: str) -> set[str]:
    """The rows of equal parts that a tensor stands in: ``experts.*.weight`` for ``experts.3.weight``."""
    parts = name.split(".")
    return {".".join([*parts[:i], "*", *parts[i + 1 :]]) for i, part in enumerate(parts) if part.isdigit()}
