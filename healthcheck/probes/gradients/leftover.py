"""Gradients of the last step that nobody cleared: a missing ``zero_grad``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.gradients.leftover_counts import GradientMarks
from healthcheck.probes.values import GRADIENT, IS_NONE, on_host, optimizer_labels, scalar, spread
from healthcheck.probes.weights.sampling import ElementSampler, SampledRows
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Cost, Metric, Sample

TENSORS = 16
"""Tensors looked at, spread over the optimizer's: zero_grad clears all or none."""


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
    place. That holds with several micro-batches, with ``set_to_none`` either way, wherever the loop calls ``zero_grad``, and for several
    optimizers that clear at different times.

    A loop that tells its loss after the update shows no moment before the backward pass. There
    torch's version counters say whether a gradient was cleared in between.
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
            "Part of the looked-at tensors whose gradient still held the last step's values.",
            "fraction",
            Cost.DEVICE,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._left: dict[int, _Left] = {}
        self._marks: dict[int, GradientMarks] = {}
        self._loss_seen = -1
        """Step of the last loss. A loop that tells its loss after the update shows no backward pass before it."""

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
        looked_at = list(spread(params, TENSORS))
        if self._loss_seen != event.step:  # the loss comes after the update: nothing is told before the next one
            marks = GradientMarks.after(event, looked_at)
            if marks is not None:
                self._marks[event.optimizer_index] = marks
            return
        sampler = ElementSampler(looked_at)
        fingerprint = sampler.gradients()
        # Rows without any finite non-zero element prove nothing.
        still = [(rows.values != 0).any(1) & rows.values.isfinite().all(1) for rows in fingerprint]
        gradients = [weak(p.grad) for p in sampler.params]
        self._left[event.optimizer_index] = _Left(weak(event.optimizer), sampler, fingerprint, gradients, still)

    @staticmethod
    def _count(event: Event, marks: GradientMarks) -> Iterable[Sample]:
        found = marks.held(event)
        if found is None:
            return ()
        held, asked = found
        facts = {"tensors": f"{held:,} of {asked:,} tensors looked at were not cleared since the last update"}
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
        for k, (old, now) in enumerate(zip(left.fingerprint, left.sampler.gradients("now"), strict=True)):
            held = (now.values == old.values).all(1) if first else (now.values != 0).any(1)
            left.still[k] = left.still[k] & held

    @staticmethod
    def _judge(event: Event, left: _Left) -> Iterable[Sample]:
        import torch

        usable = [(rows.values != 0).any(1) & rows.values.isfinite().all(1) for rows in left.fingerprint]
        if not usable:
            return (Sample("grads.leftover", event.step, 0.0, optimizer_labels(event.optimizer_index)),)
        home = usable[0].device
        asked = torch.stack([u.sum().to(home) for u in usable]).sum()
        if on_host(asked) and int(asked) == 0:
            return ()
        if not any(map(_added_to, left.sampler.params, left.gradients)):
            return (Sample("grads.leftover", event.step, 0.0, optimizer_labels(event.optimizer_index)),)
        held = torch.stack([s.sum().to(home) for s in left.still]).sum()
        share = scalar(held / asked.clamp(min=1))

        def facts() -> Mapping[str, Any]:
            return {"tensors": f"{int(held):,} of {int(asked):,} tensors looked at held the last step's gradient"}

        return (Sample("grads.leftover", event.step, share, optimizer_labels(event.optimizer_index), detail=facts),)


def _added_to(parameter: Any, old: Callable[[], Any]) -> bool:
    """Whether what a parameter has now may be its old gradient with a new one on top.

    A backward pass adds in place, unless it makes a graph of the gradient. A script that sets ``p.grad`` by itself (from
    half-precision weights, from gradients of several losses) has left nothing over, though it clears nothing.
    """
    now = parameter.grad
    return now is not None and (now is old() or bool(now.requires_grad))
