"""The order of backward pass, update and ``zero_grad``: gradients that are lost before they are used, or used twice."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.values import on_host, optimizer_labels
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Cost, Metric, Sample

TENSORS = 4
"""Tensors looked at, the smallest of the optimizer's: zero_grad clears all or none."""
UPDATES = 20
"""Updates over which reused gradients are counted."""
SETTLED = 40
"""Updates after which two or three in a row, the last of them one for which a rule is due, are looked at and not all."""
_KEYS = ("grads.cleared", "updates.reused")
_SIZE = operator.methodcaller("numel")


@dataclass(slots=True)
class _Order:
    """What is known of one optimizer between two of its updates."""

    losses: int = 0
    """Backward passes of the run when it last made an update."""
    gradient: Callable[[], Any] = lambda: None
    version: int = -1
    step: int = 0
    """Of the last update looked at."""
    updates: int = 0
    turn: bool = False
    reused: deque[bool] = field(default_factory=lambda: deque(maxlen=UPDATES))
    armed: list[Any] = field(default_factory=list)
    """Handles of the hooks that wait for the next backward pass."""
    got: set[int] = field(default_factory=set)
    looked_at: int = 0


class StepOrderProbe:
    """Two orders of calls that raise no error and train nothing, or something else.

    *Cleared*: the backward pass made gradients and the update found none, because ``zero_grad`` stands between them
    or the update before the backward pass. Suspected where an update meets no gradient at all (or, on the host, only
    zeros in the tensors looked at); then hooks on a few parameters watch one backward pass, and are removed.

    *Reused*: an update without a backward pass since the optimizer's last one, with the very same gradients, which
    torch's version counters prove without a look at them. Gradients that a script writes itself are none.
    """

    name = "step-order"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "grads.cleared",
            "Part of the looked-at tensors whose gradient was there after the backward pass and gone at the update.",
            "fraction",
            Cost.HOST,
        ),
        Metric(
            "updates.reused",
            f"Part of the last {UPDATES} updates that applied the gradients of the update before once more.",
            "fraction",
            Cost.HOST,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._losses = 0
        self._orders: dict[int, _Order] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.LOSS:
            self._losses += 1
            return ()
        if event.optimizer is None:
            return ()
        order = self._orders.setdefault(event.optimizer_index, _Order())
        labels, step = optimizer_labels(event.optimizer_index), event.step
        samples = []
        follows, order.step = order.step >= step - 1, step
        order.updates += 1
        if self._losses:
            reused = self._is_reused(order, event.optimizer)
            if follows:  # after a rest there is nothing to compare with
                order.reused.append(reused)
            if len(order.reused) == UPDATES and "updates.reused" in demand.due_now:
                count = sum(order.reused)
                facts = {"updates": f"{count} of the last {UPDATES} updates had no backward pass of their own"}
                samples.append(Sample("updates.reused", step, count / UPDATES, labels, detail=lambda: facts))
        if order.armed:
            samples += self._judge(order, event)
        elif "grads.cleared" in demand.due_now:
            if _is_there(event.optimizer):
                self._rest(order, demand)
                return [*samples, Sample("grads.cleared", step, 0.0, labels)]
            params = _trainable(event.optimizer)
            if params and _all_gone(params):
                self._arm(order, params)
            else:
                samples.append(Sample("grads.cleared", step, 0.0, labels))
        if not order.armed:
            self._rest(order, demand)
        return samples

    def _rest(self, order: _Order, demand: Demand) -> None:
        if order.updates > SETTLED and order.step == demand.next_due(_KEYS, order.step - 1):
            due = demand.next_due(_KEYS, order.step)
            order.turn = not order.turn
            self.rests_until = due - 1 - order.turn  # every second update may be the one that is made twice

    def _is_reused(self, order: _Order, optimizer: Any) -> bool:
        gradient = next(
            (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None), None
        )
        if gradient is None:
            order.losses, order.version = self._losses, -1
            return False
        version = gradient._version
        reused = order.losses == self._losses and order.version == version and order.gradient() is gradient
        order.losses, order.version = self._losses, version
        if order.gradient() is not gradient:
            order.gradient = weak(gradient)
        return reused

    def _arm(self, order: _Order, params: Sequence[Any]) -> None:
        few = sorted(params, key=_SIZE)[:TENSORS]
        order.got, order.looked_at = set(), len(few)

        def took(number: int) -> Callable[[Any], None]:
            def hook(parameter: Any) -> None:
                if parameter.grad is not None and not _is_zero(parameter.grad):
                    order.got.add(number)

            return hook

        order.armed = [p.register_post_accumulate_grad_hook(took(n)) for n, p in enumerate(few) if p.is_leaf]

    def _judge(self, order: _Order, event: Event) -> Iterable[Sample]:
        self._disarm(order)
        lost = len(order.got) if _all_gone(_trainable(event.optimizer)) else 0
        looked = order.looked_at

        def facts() -> Mapping[str, Any]:
            return {"tensors": f"{lost} of {looked} tensors looked at got a gradient in the backward pass and lost it"}

        share = lost / looked
        return (Sample("grads.cleared", event.step, share, optimizer_labels(event.optimizer_index), detail=facts),)

    @staticmethod
    def _disarm(order: _Order) -> None:
        for handle in order.armed:
            handle.remove()
        order.armed = []

    def close(self) -> None:
        """Remove hooks that still wait."""
        for order in self._orders.values():
            self._disarm(order)


def _trainable(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()]


def _is_there(optimizer: Any) -> bool:
    """Whether the first parameter that is trained has a gradient on a device, which then counts as some."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.numel():
                gradient = parameter.grad
                return gradient is not None and not on_host(gradient)
    return False


def _all_gone(params: Sequence[Any]) -> bool:
    """Whether no parameter has a gradient, or the smallest ones, on the host, have zeros for theirs."""
    if params[0].grad is None:
        return all(p.grad is None for p in params)
    few = sorted(params, key=_SIZE)[:TENSORS]
    return all(p.grad is not None and on_host(p.grad) and _is_zero(p.grad) for p in few)


def _is_zero(gradient: Any) -> bool:
    """Exact, on the host; a gradient on a device counts as some: asking would be a wait."""
    import torch

    return on_host(gradient) and gradient.layout is torch.strided and not bool(gradient.any())
