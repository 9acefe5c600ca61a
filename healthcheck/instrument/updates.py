"""The optimizers of a run: whose turn it is in a step, and what is known of an update before it is made."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from healthcheck.core.rows import Update
from healthcheck.instrument.modelview import FoundModel, living, parameters_of

if TYPE_CHECKING:
    from healthcheck.run.session import Session

PARAMS = operator.itemgetter("params")


@dataclass(slots=True)
class UpdatePlan:
    """What there is to know about the updates of one optimizer before each of them.

    Made once, and used until the optimizer's groups change. Which events are worth building is kept by the session for
    each step (``session.wanted``).
    """

    optimizer: weakref.ref[Any]
    index: int
    """0 for the optimizer seen first."""
    sizes: tuple[int, ...]
    """Parameters in each of its groups: what this was made for."""
    way: str
    """How rules can hold its updates back (:meth:`UpdateGate.way`)."""
    parameters: frozenset[int]
    """Ids of its parameters."""
    update: Update
    """Shown to probes that look at every update, one object for all of them. Holds the optimizer only meanwhile."""


def sizes_of(optimizer: Any) -> tuple[int, ...]:
    """Parameters in each group of an optimizer."""
    return tuple(map(len, map(PARAMS, optimizer.param_groups)))


_PAST: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers of runs in this process that are over. Some outlive them, by a hook, a notebook or a fixture."""


class Optimizers:
    """The optimizers of one run, and whose turn it is in a step. They are known by weak references alone.

    A step is over when the optimizers that stepped in the step before have all stepped again; the first is over when all
    that live have stepped.

    :param only: those to look at; None for all.
    :param met: called with an optimizer that steps for the first time.
    :param way: how rules can hold back the updates of an optimizer.
    """

    def __init__(
        self,
        view: FoundModel,
        only: Iterable[Any] | None,
        session: Session,
        *,
        met: Callable[[Any], None],
        way: Callable[[Any], str],
    ) -> None:
        self.only: weakref.WeakSet[Any] | None = None if only is None else weakref.WeakSet(only)
        self.stepped: set[int] = set()
        """Indices of those that have stepped in this step."""
        self.living = 1
        """How many there were when training began; those that share parameters count once."""
        self.expected: set[int] | None = None
        """Those that stepped in the step before; None in the first, which is over when all that live have stepped."""
        self._view = view
        self._met = met
        self._way = way
        self._session = session
        self.plans: dict[int, UpdatePlan] = {}
        """By the id of the optimizer; one that is gone takes its plan with it."""
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __len__(self) -> int:
        """How many have stepped and are still there."""
        return len(self.plans)

    def watch_only(self, optimizers: Iterable[Any] | None) -> Iterable[Any] | None:
        """Look at these from now on, None for all; returns those before."""
        before, self.only = self.only, None if optimizers is None else weakref.WeakSet(optimizers)
        return before

    def look_around(self) -> None:
        """Get to know what there is to train, before the first event."""
        modules: list[Any] | None = None
        if self.only is None:
            alive, modules = living()
            optimizers = [o for o in alive if o not in _PAST]
        else:
            optimizers = list(self.only)
        self._seen.update(optimizers)
        self.living = len({id(parameters_of(o)[0]) for o in optimizers if parameters_of(o)})
        self._view.scan(optimizers, modules)

    def forget(self) -> None:
        """Another training begins, with optimizers of its own."""
        self.stepped, self.expected = set(), None
        self.plans.clear()
        self._view.forget_optimizers()

    def retire(self) -> None:
        """The run is over. What is left of its optimizers is none of the next one's, until it steps again."""
        _PAST.update(self._seen)

    def of_last_step(self) -> list[tuple[Any, int]]:
        """Those that stepped in the step that is under way or was the last, with their indices."""
        known = [(plan.optimizer(), plan.index) for plan in self.plans.values() if plan.index in self.stepped]
        return [(optimizer, index) for optimizer, index in known if optimizer is not None]

    # -- plans ------------------------------------------------------------------------

    def plan(self, optimizer: Any) -> UpdatePlan:
        """What is to be done about an update of this optimizer."""
        plan = self.plans.get(id(optimizer))
        if plan is None or plan.optimizer() is not optimizer:
            return self._meet(optimizer)
        return plan if plan.sizes == sizes_of(optimizer) else self._make_plan(optimizer, plan.index)

    def _meet(self, optimizer: Any) -> UpdatePlan:
        if self.plans and not self.stepped:
            # Samples that wait to be judged may hold on to an optimizer that the script has let go. Where another one has
            # stepped in this step they take turns, and what kind of run it is may not be decided before all have.
            self._session.judge_now()
        # Those that are gone have left their numbers.
        taken = {plan.index for plan in self.plans.values()}
        index = next(i for i in itertools.count() if i not in taken)
        self._seen.add(optimizer)
        _PAST.discard(optimizer)
        self._view.add_optimizer(optimizer)
        self._met(optimizer)
        return self._make_plan(optimizer, index)

    def _make_plan(self, optimizer: Any, index: int) -> UpdatePlan:
        ids = frozenset(map(id, parameters_of(optimizer)))
        update = Update(self._view, self._session.demand, optimizer_index=index)
        key = id(optimizer)
        alive = weakref.ref(optimizer, lambda _: self.plans.pop(key, None))
        plan = UpdatePlan(alive, index, sizes_of(optimizer), self._way(optimizer), ids, update)
        self.plans[key] = plan
        return plan

    def trains(self, parameters: Sequence[Any]) -> bool:
        """Whether one of these parameters belongs to an optimizer that is looked at."""
        if self.only is None:
            return True
        for optimizer in self.only:
            plan = self.plans.get(id(optimizer))
            if (
                plan is not None
                and plan.optimizer() is optimizer
                and plan.sizes == sizes_of(optimizer)
                and not plan.parameters.isdisjoint(map(id, parameters))  # ends at the first that is there
            ):
                return True
        # Not among those of the plans: an optimizer is new, or its parameters have been exchanged.
        ids = set(map(id, parameters))
        return any(not ids.isdisjoint(map(id, parameters_of(optimizer))) for optimizer in self.only)


def with_closure(
    closure: Callable[..., Any], evaluated: Callable[[], None], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an optimizer's step, with a closure that says when it was evaluated."""

    def watched_closure(*given: Any, **named: Any) -> Any:
        result = closure(*given, **named)
        evaluated()
        return result

    if len(args) > 1:
        return (args[0], watched_closure, *args[2:]), dict(kwargs)
    return args, {**kwargs, "closure": watched_closure}


def found_inf_on_host(optimizer: Any) -> bool:
    """Whether a ``GradScaler`` drives a fused step that will not be applied; False where only the device knows."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and getattr(getattr(found, "device", None), "type", "") == "cpu" and bool(found)
