"""Gradients of the last step that nobody cleared: a missing ``zero_grad``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.references import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number, value_of
from healthcheck.device.sampling import ElementSampler, SampledRows
from healthcheck.device.tensors import GRADIENT, IS_NONE, evenly
from healthcheck.probes.labels import optimizer_labels, where_called

TENSORS = 16
"""Tensors looked at, spread over the optimizer's: zero_grad clears all or none."""


@dataclass(slots=True)
class GradientMarks:
    """Which tensors one optimizer's gradients were after an update, and how often each had been written.

    For loops that report their loss after the update, so that nothing is seen before the backward pass: torch's version
    counters prove what happened. A gradient that was cleared is another tensor afterwards (``set_to_none``), or was
    written once more than the backward pass writes it. One that was not is the same tensor, written by the backward pass
    alone.
    """

    step: int
    optimizer: Callable[[], Any]
    marks: list[tuple[Callable[[], Any], Callable[[], Any], int]]

    @classmethod
    def after(cls, event: Event, params: Iterable[Any]) -> GradientMarks | None:
        """Note the gradients of ``params`` after the update of ``event``; None where versions prove nothing.

        A loss scale is taken out of the gradients in place, by some scalers and not by others.
        """
        import torch

        if event.loss_scale is not None:
            return None
        marks = [(weak(p), weak(p.grad), p.grad._version) for p in params if type(p.grad) is torch.Tensor]
        return cls(event.step, weak(event.optimizer), marks) if marks else None

    def held(self, event: Event) -> tuple[int, int] | None:
        """How many still hold the old gradient before the next update, of how many; None if that is unknown.

        Counted are those written once since, or twice where the loop clips: with several micro-batches that
        finds nothing, and never what is not there.
        """
        if event.optimizer is not self.optimizer() or event.step != self.step + 1 or event.loss_scale is not None:
            return None
        # The backward pass writes once, clipping once more.
        writes = 1 if event.max_norm is None else 2
        held = 0
        for parameter, gradient, version in self.marks:
            now = getattr(parameter(), "grad", None)
            held += now is not None and now is gradient() and now._version - version == writes
        return held, len(self.marks)


@dataclass(slots=True)
class _Left:
    """Gradients as one optimizer's update left them, and what became of each since."""

    optimizer: Callable[[], Any]
    sampler: ElementSampler
    fingerprint: list[SampledRows]
    gradients: list[Callable[[], Any]]
    """Ways to the gradients themselves, in the order of the sampler's parameters."""
    still: list[Any]
    """Per group: which rows have held at least the old gradient at every loss since."""
    seen_loss: bool = False
    cleared: bool = False
    """Set once all of them were seen to be None: nothing more to compare."""


class LeftoverProbe:
    """Compares gradients just before each backward pass with those that the last update used.

    Between two updates of an optimizer, correct loops show a cleared gradient (None or zeros)
    before at least one backward pass. Gradients are left over if the first pass meets exactly the
    old values, no later one meets a cleared gradient, and nobody has put other tensors in their
    place. That holds with several micro-batches, with ``set_to_none`` either way, wherever the loop calls
    ``zero_grad``, and for several optimizers that clear at different times.

    A loop that reports its loss after the update shows no moment before the backward pass; see
    :class:`GradientMarks`.
    """

    name = "leftover-gradients"
    stretchable = ("grads.leftover",)
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (
        EventKind.LOSS,
        EventKind.BEFORE_UPDATE,
        EventKind.AFTER_UPDATE,
        EventKind.STEP_END,
    )
    only_when_due = (EventKind.AFTER_UPDATE,)
    steps_ahead = 1
    """Gradients are noted in the step before."""
    provides: tuple[Metric, ...] = (
        Metric(
            "grads.leftover",
            "Share of the sampled tensors whose gradient still held the last step's values.",
            "fraction",
            Cost.DEVICE,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._samplers: weakref.WeakKeyDictionary[Any, ElementSampler] = weakref.WeakKeyDictionary()
        """Of each optimizer, as long as it lives: it holds the same parameters."""
        self._left: dict[int, _Left] = {}
        self._marks: dict[int, GradientMarks] = {}
        self._loss_seen = -1
        """Step of the last loss."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.LOSS:
            self._loss_seen = event.step
            for kept in self._left.values():
                self._look(kept)
            return ()
        if event.kind is EventKind.AFTER_UPDATE:
            if demand.due("grads.leftover", event.step + 1) and event.optimizer is not None and not event.skipped:
                self._remember(event)  # judged there
            return ()
        if event.kind is EventKind.STEP_END:
            if event.skipped:  # nobody may clear after an update that never was
                self._left.pop(event.optimizer_index, None)
            if not self._left and not self._marks:
                self.rests_until = demand.next_due(("grads.leftover",), event.step + 1) - 1
            return ()
        marks = self._marks.pop(event.optimizer_index, None)
        if marks is not None:
            return self._count(event, marks)
        if not self._left:
            return ()
        # A replaced optimizer never steps again; what we hold of it must not live on.
        self._left = {k: kept for k, kept in self._left.items() if kept.optimizer() is not None}
        left: _Left | None = self._left.pop(event.optimizer_index, None)
        if left is None or not left.seen_loss or left.optimizer() is not event.optimizer:
            return ()
        return self._judge(event, left)

    def _remember(self, event: Event) -> None:
        import torch

        params = [p for group in event.optimizer.param_groups for p in group["params"] if p.grad is not None]
        params = [p for p in params if p.grad.layout is torch.strided]
        looked_at = list(evenly(params, TENSORS))
        if self._loss_seen != event.step:  # the loss is reported after the update
            marks = GradientMarks.after(event, looked_at)
            if marks is not None:
                self._marks[event.optimizer_index] = marks
            return
        sampler = self._samplers.get(event.optimizer)
        if sampler is None or len(sampler.params) != len(looked_at) or not all(map(is_, sampler.params, looked_at)):
            sampler = self._samplers[event.optimizer] = ElementSampler(looked_at)
        fingerprint = sampler.gradients()
        still = list(map(_proves_something, fingerprint))
        gradients = [weak(p.grad) for p in sampler.params]
        self._left[event.optimizer_index] = _Left(weak(event.optimizer), sampler, fingerprint, gradients, still)

    @staticmethod
    def _count(event: Event, marks: GradientMarks) -> Iterable[Sample]:
        found = marks.held(event)
        if found is None:
            return ()
        held, asked = found
        facts = {"tensors": f"{held:,} of {asked:,} sampled tensors were not cleared since the last update"}
        facts |= where_called(event, "backward")
        labels = optimizer_labels(event.optimizer_index)
        return (Sample("grads.leftover", event.step, held / asked, labels, detail=lambda: facts),)

    @staticmethod
    def _look(left: _Left) -> None:
        first, left.seen_loss = not left.seen_loss, True
        if left.cleared:
            return
        if all(map(IS_NONE, map(GRADIENT, left.sampler.params))):
            left.cleared = True
            left.still = [flags & False for flags in left.still]
            return
        # At the first loss since the update exactly the old values, at later ones at least not zero: micro-batches add to them.
        for k, (old, now) in enumerate(zip(left.fingerprint, left.sampler.gradients("now"), strict=True)):
            held = (now.values == old.values).all(1) if first else (now.values != 0).any(1)
            left.still[k] = left.still[k] & held

    @staticmethod
    def _judge(event: Event, left: _Left) -> Iterable[Sample]:
        import torch

        labels = optimizer_labels(event.optimizer_index)
        usable = list(map(_proves_something, left.fingerprint))
        if not usable:
            return (Sample("grads.leftover", event.step, 0.0, labels),)
        home = usable[0].device
        asked = number(torch.stack([rows.sum().to(home) for rows in usable]).sum())
        # Without an old gradient that may have been added to, nothing was left over, whatever values look like.
        held: Any = 0.0
        if any(map(_added_to, left.sampler.params, left.gradients)):
            held = number(torch.stack([rows.sum().to(home) for rows in left.still]).sum())
        share = calculate(_share, held, asked)

        place = where_called(event, "backward")

        def facts() -> Mapping[str, Any]:
            counts = f"{value_of(held):,.0f} of {value_of(asked):,.0f}"
            return {"tensors": f"{counts} sampled tensors held the last step's gradient"} | place

        return () if share is None else (Sample("grads.leftover", event.step, share, labels, detail=facts),)


def _proves_something(rows: SampledRows) -> Any:
    """Which rows hold a number that is not zero and none that is not finite: the others may look the same by chance."""
    return (rows.values != 0).any(1) & rows.values.isfinite().all(1)


def _share(held: float, asked: float) -> float | None:
    return held / asked if asked else None


def _added_to(parameter: Any, old: Callable[[], Any]) -> bool:
    """Whether what a parameter has now may be its old gradient with a new one on top.

    A backward pass adds in place, unless it makes a graph of the gradient. A script that sets ``p.grad`` by itself (from
    half-precision weights, from gradients of several losses) has left nothing over, though it clears nothing.
    """
    now = parameter.grad
    return now is not None and (now is old() or bool(now.requires_grad))
