"""Whose gradients are measured: the trained parameters, asked for at every step."""

from __future__ import annotations

from typing import Any

from healthcheck.events import Event
from healthcheck.references import weak

LOOK_EVERY = 50
"""Steps between two full looks at a model whose one optimizer holds all that is trained."""


class TrainedParameters:
    """Named parameters of an event's model, in the model's order, without naming them anew at every step.

    Where a model has one optimizer and that holds everything that is trained, its own lists say which
    parameters there are; names and order are those of the last full look, unless a list has changed.
    Keeps no parameter alive.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        """Of the parameters that :meth:`of` returned last; another list object whenever they are others."""
        self._ids: list[int] = []
        self._optimizer: Any = None
        self._lists: list[tuple[int, int]] = []
        self._ends: tuple[Any, Any] = (None, None)
        self._order: list[int] | None = None
        self._age = LOOK_EVERY

    def of(self, event: Event) -> list[Any]:
        """The parameters, alive while the caller holds them."""
        if event.model is None:
            return []
        optimizers = event.model.optimizers()
        if len(optimizers) == 1:
            self._age += 1
            groups = optimizers[0].param_groups
            flat = groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]]
            if self._age <= LOOK_EVERY and flat and self._still(optimizers[0], flat):
                return flat if self._order is None else [flat[i] for i in self._order]
        return self._look(event, optimizers)

    def _still(self, optimizer: Any, flat: list[Any]) -> bool:
        first, last = self._ends
        return bool(
            self._optimizer is not None
            and self._optimizer() is optimizer
            and first() is flat[0]
            and last() is flat[-1]
            and self._lists == [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        )

    def _look(self, event: Event, optimizers: Any) -> list[Any]:
        assert event.model is not None
        named = event.model.named_parameters()
        if len(optimizers) > 1:
            # With several optimizers the others' gradients are leftovers or by-products.
            optimizer = event.optimizer
            if optimizer is None and event.optimizer_index < len(optimizers):
                optimizer = optimizers[event.optimizer_index]
            if optimizer is not None:
                own = {id(p) for group in optimizer.param_groups for p in group["params"]}
                named = [pair for pair in named if id(pair[1]) in own]
        names, params = [name for name, _ in named], [p for _, p in named]
        self._optimizer = None
        if len(optimizers) == 1:
            flat = [p for group in optimizers[0].param_groups for p in group["params"]]
            places = {id(p): place for place, p in enumerate(flat)}
            trained = [(name, p) for name, p in named if id(p) in places]
            if flat and len(trained) == len(flat) and all(p.grad is None for p in params if id(p) not in places):
                names, params = [name for name, _ in trained], [p for _, p in trained]
                order = [places[id(p)] for p in params]
                self._order = None if order == list(range(len(flat))) else order
                self._optimizer = weak(optimizers[0])
                self._lists = [(id(group["params"]), len(group["params"])) for group in optimizers[0].param_groups]
                self._ends = (weak(flat[0]), weak(flat[-1]))
                self._age = 0
        ids = list(map(id, params))
        if ids != self._ids or names != self.names:
            self._ids, self.names = ids, names
        return params
