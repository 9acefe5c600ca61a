"""The optimizers of a run: which are looked at, which share a step, and what is done about the updates of each."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from healthcheck.trainers.modelview import FoundModel, living_optimizers, parameters_of

_PARAMS = operator.itemgetter("params")


@dataclass(slots=True)
class UpdatePlan:
    """What there is to know about the updates of one optimizer before each of them.

    Made once, and used until the optimizer's groups change. Which events are worth building is kept by the session for
    each step (``session.wanted``).
    """

    index: int
    """0 for the optimizer seen first."""
    sizes: tuple[int, ...]
    """Parameters in each of its groups: what this was made for."""
    gated: bool
    """Whether rules may hold its updates back."""
    parameters: frozenset[int]
    """Ids of its parameters."""


def sizes_of(optimizer: Any) -> tuple[int, ...]:
    """Parameters in each group of an optimizer."""
    return tuple(map(len, map(_PARAMS, optimizer.param_groups)))


_PAST: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers of runs in this process that are over. Some outlive them, by a hook, a notebook or a fixture."""


class Optimizers:
    """The optimizers of one run, and whose turn it is in a step. They are known by weak references alone.

    A step is over when the optimizers that stepped in the step before have all stepped again; the first is over when all
    that live have stepped.

    :param only: those to look at; None for all.
    :param met: called with an optimizer that steps for the first time.
    :param gated: whether rules may hold updates back.
    """

    def __init__(
        self,
        view: FoundModel,
        only: Iterable[Any] | None,
        *,
        met: Callable[[Any], None],
        gated: Callable[[], bool],
    ) -> None:
        self.only: weakref.WeakSet[Any] | None = None if only is None else weakref.WeakSet(only)
        self.stepped: set[int] = set()
        """Indices of those that have stepped in this step."""
        self.living = 1
        """How many there were when training began; those that share parameters count once."""
        self._expected: set[int] | None = None
        """Those that stepped in the step before."""
        self._view = view
        self._met = met
        self._gated = gated
        self._plans: weakref.WeakKeyDictionary[Any, UpdatePlan] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __len__(self) -> int:
        """How many have stepped and are still there."""
        return len(self._plans)

    def watch_only(self, optimizers: Iterable[Any] | None) -> Iterable[Any] | None:
        """Look at these from now on, None for all; returns those before."""
        before, self.only = self.only, None if optimizers is None else weakref.WeakSet(optimizers)
        return before

    def look_around(self) -> None:
        """Get to know what there is to train, before the first event."""
        optimizers = [o for o in living_optimizers() if o not in _PAST] if self.only is None else list(self.only)
        self._seen.update(optimizers)
        self.living = len({id(parameters_of(o)[0]) for o in optimizers if parameters_of(o)})
        self._view.scan(optimizers)

    def forget(self) -> None:
        """Another training begins, with optimizers of its own."""
        self.stepped, self._expected = set(), None
        self._plans.clear()
        self._view.forget_optimizers()

    def retire(self) -> None:
        """The run is over. What is left of its optimizers is none of the next one's, until it steps again."""
        _PAST.update(self._seen)

    # -- steps ------------------------------------------------------------------------

    def next_step(self, *, wait: bool) -> bool:
        """The next step begins. False if it does not: with ``wait`` optimizers that have not stepped yet may still belong
        to the last one.
        """
        stepped = self.stepped
        if wait:
            known = len(self._plans)
            if known and len(stepped) < max(known, self.living):
                return False
        if stepped:
            self._expected, self.stepped = stepped, set()
        return True

    @property
    def all_stepped(self) -> bool:
        """Whether no optimizer is waited for any more."""
        return len(self.stepped) >= self.living if self._expected is None else self.stepped >= self._expected

    # -- plans ------------------------------------------------------------------------

    def plan(self, optimizer: Any) -> UpdatePlan:
        """What is to be done about an update of this optimizer."""
        plan = self._plans.get(optimizer)
        if plan is None:
            plan = self._meet(optimizer)
        # As in `sizes_of`, which would be one more call at every update.
        elif plan.sizes != tuple(map(len, map(_PARAMS, optimizer.param_groups))):
            plan = self._make_plan(optimizer, plan.index)
        return plan

    def _meet(self, optimizer: Any) -> UpdatePlan:
        # Those that are gone have left their numbers.
        taken = {plan.index for plan in self._plans.values()}
        index = next(i for i in itertools.count() if i not in taken)
        self._seen.add(optimizer)
        _PAST.discard(optimizer)
        self._view.add_optimizer(optimizer)
        self._met(optimizer)
        return self._make_plan(optimizer, index)

    def _make_plan(self, optimizer: Any, index: int) -> UpdatePlan:
        ids = frozenset(map(id, parameters_of(optimizer)))
        plan = self._plans[optimizer] = UpdatePlan(index, sizes_of(optimizer), self._gated(), ids)
        return plan

    def trains(self, parameters: Iterable[Any]) -> bool:
        """Whether one of these parameters belongs to an optimizer that is looked at."""
        if self.only is None:
            return True
        ids = set(map(id, parameters))
        for optimizer in self.only:
            plan = self._plans.get(optimizer)
            if plan is not None and plan.sizes == sizes_of(optimizer) and not ids.isdisjoint(plan.parameters):
                return True
        # Not among those of the plans: an optimizer is new, or its parameters have been exchanged.
        return any(not ids.isdisjoint(map(id, parameters_of(optimizer))) for optimizer in self.only)
