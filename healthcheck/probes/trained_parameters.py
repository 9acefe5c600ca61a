"""Which parameters an update trains: named, in the model's order, and without a look at the model in every step."""

from __future__ import annotations

import operator
from itertools import chain
from typing import Any

from healthcheck.core.events import Event
from healthcheck.core.rows import Update
from healthcheck.core.runinfo import weak

LOOK_EVERY = 100
"""Steps between two full looks at a model whose one optimizer holds all that is trained."""


_PARAMS = operator.itemgetter("params")


class TrainedParameters:
    """Named parameters of an event's model, in the model's order, without naming them anew at every step.

    Where an optimizer holds everything that is trained, or several take turns, its own lists say which
    parameters there are; names and order are those of the last full look, unless a list has changed.
    Keeps no parameter alive. One for each optimizer.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        """Of the parameters that :meth:`of` returned last; another list object whenever they are others."""
        self._ids: list[int] = []
        self._optimizer: Any = lambda: None
        self._index = 0
        """Index of that optimizer."""
        self._lists: tuple[list[int], list[int]] = ([], [])
        """Identities and lengths of the optimizer's lists at the last full look."""
        self._ends: tuple[Any, Any] = (None, None)
        self._thawed = (True, True)
        """Whether the first and the last tensor of those lists required gradients."""
        self._order: list[int] | None = None
        self._age = LOOK_EVERY

    def of(self, event: Event | Update) -> list[Any]:
        """The parameters, alive while the caller holds them."""
        if event.model is None:
            return []
        optimizer = self._optimizer()  # whoever else steps asks for a full look
        own = event.optimizer is optimizer or (event.optimizer is None and event.optimizer_index == self._index)
        if optimizer is not None and self._age < LOOK_EVERY and own:
            self._age += 1
            lists = list(map(_PARAMS, optimizer.param_groups))
            flat = lists[0] if len(lists) == 1 else list(chain.from_iterable(lists))
            # Who replaces parameters in place keeps lists and their lengths: the ends catch most of that, and the full look
            # every LOOK_EVERY steps the rest.
            first, last = self._ends
            if (
                flat
                and first() is flat[0]
                and last() is flat[-1]
                and self._thawed == (flat[0].requires_grad, flat[-1].requires_grad)
                and self._lists == (list(map(id, lists)), list(map(len, lists)))
            ):
                return flat if self._order is None else list(map(flat.__getitem__, self._order))
        return self._look(event, event.model.optimizers())

    def _look(self, event: Event | Update, optimizers: Any) -> list[Any]:
        assert event.model is not None
        named = event.model.named_parameters()
        optimizer = optimizers[0] if len(optimizers) == 1 else event.optimizer
        if len(optimizers) > 1:
            # With several optimizers the others' gradients are leftovers or by-products.
            if optimizer is None and event.optimizer_index < len(optimizers):
                optimizer = optimizers[event.optimizer_index]
            if optimizer is not None:
                own = {id(p) for group in optimizer.param_groups for p in group["params"]}
                named = [pair for pair in named if id(pair[1]) in own]
        # Of what is frozen a gradient of zeros may be left; where all are frozen, gradients are written by hand.
        frozen = {id(p) for _, p in named if not p.requires_grad}
        if 0 < len(frozen) < len(named):
            named = [pair for pair in named if id(pair[1]) not in frozen]
        else:
            frozen = set()
        names, params = [name for name, _ in named], [p for _, p in named]
        self._optimizer, self._age = lambda: None, LOOK_EVERY
        if optimizer is not None:
            flat = [p for group in optimizer.param_groups for p in group["params"]]
            places = {id(p): place for place, p in enumerate(flat)}
            trained = [(name, p) for name, p in named if id(p) in places]
            held = len(flat) - sum(id(p) in frozen for p in flat) if frozen else len(flat)
            if flat and len(trained) == held and all(p.grad is None for p in params if id(p) not in places):
                names, params = [name for name, _ in trained], [p for _, p in trained]
                order = [places[id(p)] for p in params]
                self._order = None if order == list(range(len(flat))) else order
                self._optimizer, self._index = weak(optimizer), event.optimizer_index
                lists = list(map(_PARAMS, optimizer.param_groups))
                self._lists = (list(map(id, lists)), list(map(len, lists)))
                self._ends = (weak(flat[0]), weak(flat[-1]))
                self._thawed = (flat[0].requires_grad, flat[-1].requires_grad)
                self._age = 0
        # The same list object while nothing changes: callers compare it instead of a thousand names.
        ids = list(map(id, params))
        if ids != self._ids or names != self.names:
            self._ids, self.names = ids, names
        return params
