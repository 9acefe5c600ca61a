"""Gradients of micro-batches that are cleared before the update which should have used them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.graph.nodes import kind_of, source_of
from healthcheck.probes.graph.walk import saved
from healthcheck.probes.values import is_tensor, on_host
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Cost, Metric, Sample

TENSORS = 2
"""Tensors looked at, the smallest of the optimizer's."""


class DiscardedGradientProbe:
    """Watches one update in a while for backward passes that are thrown away.

    Between two backward passes of one update the gradients must still be there. That they are gone is no fault where
    the first pass serves something else (an adversarial example, the generator's pass through a discriminator), so that
    accumulation must be seen to be meant: the loss is divided by the number of its micro-batches, or each of them took
    a batch of its own from the loader.
    """

    name = "discarded-gradients"
    listens_to: tuple[EventKind, ...] = (EventKind.BATCH_READY, EventKind.LOSS, EventKind.BEFORE_UPDATE)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "grads.discarded",
            "Part of an update's backward passes whose gradients were cleared before the update.",
            "fraction",
            Cost.HOST,
        ),
    )

    def __init__(self) -> None:
        self._step = 0
        self._passes = self._batches = self._lost = 0
        self._fresh = False
        self._divided = False
        self._params: list[Callable[[], Any]] = []
        """The few tensors, from an update before that had several backward passes."""
        self._hooks: list[Any] = []

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.step != self._step:
            self._begin(event.step)
        if event.kind is EventKind.BATCH_READY:
            self._batches += event.phase == "train"
        elif event.kind is EventKind.LOSS:
            self._before_backward(event)
        elif event.optimizer is not None:
            return self._judge(event, demand)
        return ()

    def _begin(self, step: int) -> None:
        self._step = step
        self._passes = self._batches = self._lost = 0
        self._fresh = False
        self._divided = False
        self.close()

    def _before_backward(self, event: Event) -> None:
        params = [parameter for known in self._params if (parameter := known()) is not None]
        if self._passes == 0:
            self._hooks = [p.register_post_accumulate_grad_hook(self._took) for p in params if p.is_leaf]
        elif self._fresh and params and all(_is_gone(p.grad) for p in params):
            self._lost += 1
        self._fresh = False
        self._passes += 1
        if event.loss_graph is not None:
            self._divided = _divisor(event.loss_graph) > 1

    def _took(self, parameter: Any) -> None:
        self._fresh = self._fresh or not _is_gone(parameter.grad)

    def _judge(self, event: Event, demand: Demand) -> Iterable[Sample]:
        passes, lost, hooked = self._passes, self._lost, bool(self._hooks)
        meant = self._divided or self._batches == passes
        self._begin(event.step)
        if not demand.due("grads.discarded", event.step) or event.optimizer_index > 0:
            return ()
        if passes < 2:
            self._params = []
            return (Sample("grads.discarded", event.step, 0.0),)
        owned = [p for group in event.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._params = [weak(p) for p in sorted(owned, key=lambda p: int(p.numel()))[:TENSORS]]
        if not hooked:
            return ()

        def facts() -> Mapping[str, Any]:
            return {"passes": f"{lost} of {passes} backward passes of this update were thrown away"}

        return (Sample("grads.discarded", event.step, lost / passes if meant else 0.0, detail=facts if lost else None),)

    def close(self) -> None:
        """Remove hooks that still wait."""
        while self._hooks:
            self._hooks.pop().remove()


def _is_gone(gradient: Any) -> bool:
    """No gradient, or zeros on the host; one on a device counts as some: asking would be a wait."""
    return gradient is None or (on_host(gradient) and not gradient.is_sparse and not bool(gradient.any()))


def _divisor(root: Any) -> float:
    """The number that a loss was divided by, directly or behind the scale of a GradScaler; 1 without one."""
    node = root
    for _ in range(3):
        kind = kind_of(node)
        number: Any = saved(node, "other") if kind in ("Div", "Mul") else None
        if not is_tensor(number) or number.numel() != 1 or not on_host(number):
            return 1.0
        value = float(number)
        if kind == "Div" and value > 1:
            return value
        if kind == "Mul" and 0 < value < 1:
            return 1 / value
        node = source_of(node)
    return 1.0
