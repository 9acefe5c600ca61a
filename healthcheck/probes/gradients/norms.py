"""Gradient norms before clipping, non-finite gradients, and who carries them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.gradients.blame import RecentGradients, bad_gradient_facts
from healthcheck.probes.gradients.facts import GradientFacts, ZeroFacts, facts_of_norms, silent_together, zero_facts
from healthcheck.probes.gradients.inner import InnerPass
from healthcheck.probes.gradients.statistics import GradientPass, GradientStats, HeldGradients, gradient_stats
from healthcheck.probes.gradients.trained import TrainedParameters
from healthcheck.probes.kernels.foreach import nonfinite_count, norm_of
from healthcheck.probes.transfer.late import Element, Late
from healthcheck.probes.values import optimizer_labels, scalar, with_label
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Labels, Metric, Sample

_BESIDES = ("grad_norm[]", "grad_nonfinite", "grads.zero", "grad.layer_ratio")
"""What rules may want besides the norm of all."""


class GradientProbe:
    """One pass over the gradients per step, as early as they can be read unscaled.

    Without a loss scale that is the end of the backward pass: clipping multiplies every gradient
    by the same number, so that afterwards one NaN has become all NaN. Under a ``GradScaler`` it is
    the moment before the update, when gradients are unscaled. Where the loop clips, its own norm
    is the norm before clipping.
    """

    name = "gradients"
    stretchable = _BESIDES
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (
        EventKind.BACKWARD_END,
        EventKind.BEFORE_UPDATE,
        EventKind.AFTER_UPDATE,
        EventKind.STEP_END,
    )
    answers_once = (EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE, EventKind.STEP_END)
    provides: tuple[Metric, ...] = (
        Metric("grad_norm", "Global L2 norm of the gradients before clipping.", cost=Cost.DEVICE),
        Metric("grad_norm", "L2 norm of one parameter's gradient.", cost=Cost.DEVICE, labels=("parameter",)),
        Metric("grad_nonfinite", "Gradient elements that are NaN or infinite.", cost=Cost.DEVICE),
        Metric(
            "grads.zero",
            "Trainable tensors whose gradient is exactly zero; a bias where that of its weight is zero, too.",
            cost=Cost.DEVICE,
        ),
        Metric(
            "grad.layer_ratio",
            "Gradient norm of the first weight matrix divided by that of the last.",
            cost=Cost.DEVICE,
        ),
    )

    def __init__(self, recent: RecentGradients | None = None) -> None:
        self._recent = recent or RecentGradients()
        self._given: dict[int, int] = {}
        self._trained = TrainedParameters()
        self._passes: dict[int, GradientPass] = {}
        self._labels: dict[Labels, tuple[list[str], list[Labels]]] = {}
        self._norm_only = False
        """Whether nothing but the norm of all is wanted."""

    def plan(self, demand: Demand) -> None:
        self._norm_only = not any(demand.wants(key) for key in _BESIDES)

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if self._given.get(event.optimizer_index) == event.step:
            return ()
        if event.kind is EventKind.BACKWARD_END and event.loss_scale is not None:
            return ()
        labels = optimizer_labels(event.optimizer_index)
        if event.kind in (EventKind.AFTER_UPDATE, EventKind.STEP_END):
            inner: InnerPass | None = event.inner_gradients
            if inner is not None and inner.step == event.step:
                self._given[event.optimizer_index] = event.step
                facts = GradientFacts(inner.statistics, inner.names)
                self._recent.remember(event.step, facts)
                return self._late_samples(event, demand, inner.parameters, inner.statistics, labels, None, facts)
            # Gradients may be gone or belong to a skipped step; only the loop's own norm is sure.
            norm = scalar(event.grad_norm) if not event.skipped else None
            if norm is None:
                return ()
            self._given[event.optimizer_index] = event.step
            return (Sample("grad_norm", event.step, norm, labels),)
        params, names = self._trained.of(event), self._trained.names
        stats = self._measure(event.optimizer_index, params, names, event.kept_gradients) if params else None
        if stats is None:
            return ()
        self._given[event.optimizer_index] = event.step
        given = None if event.grad_norm is None else scalar(event.grad_norm)
        if stats.table is not None:
            facts = GradientFacts(stats, names)
            self._recent.remember(event.step, facts)
            return self._late_samples(event, demand, params, stats, labels, given, facts)
        return self._host_samples(event, demand, params, names, stats, labels, given)

    def _measure(
        self, index: int, params: list[Any], names: list[str], hold: HeldGradients | None
    ) -> GradientStats | None:
        """One pass over the gradients of one optimizer's parameters."""
        if params[0].device.type == "cpu":
            return gradient_stats(params, hold)
        known = self._passes.get(index)
        if known is None:
            known = self._passes[index] = GradientPass()
        return known.measure(params, names, hold)

    def _late_samples(
        self,
        event: Event,
        demand: Demand,
        params: Sequence[Any],
        stats: GradientStats,
        labels: Labels,
        given: Any,
        facts: GradientFacts,
    ) -> list[Sample]:
        """Gradients on a device: nothing is computed there but the one pass; the host does the rest later."""
        step = event.step
        norm: Any = stats.element("norm")
        scale = clip = None
        if event.kind is EventKind.BEFORE_UPDATE or given is not None:
            scale, clip = self._pending_scale(event), _clipped_by(event, given)
            norm = _late_norm(norm, given, scale, clip)
        samples = [Sample("grad_norm", step, norm, labels, detail=facts)]
        if self._norm_only:
            return samples
        if "grad_norm[]" in demand.due_now:
            plain = scale is None and clip is None
            for k, own in enumerate(self._family_labels(labels, facts.all_names, stats.indices)):
                element = stats.element("norm", k)
                value = element if plain else _late_norm(element, None, scale, clip)
                samples.append(Sample("grad_norm", step, value, own, detail=facts))
        if "grad_nonfinite" in demand.due_now:
            if stats.has("nonfinite"):
                count: Any = stats.element("nonfinite")
            else:
                count = scalar(nonfinite_count([params[i].grad for i in stats.indices]))
            samples.append(Sample("grad_nonfinite", step, count, labels, detail=facts))
        if "grads.zero" in demand.due_now:
            if stats.has("all_zero"):
                zeros, all_zero = ZeroFacts(stats, facts.names), stats.element("all_zero")
                value = Late(zeros.count, stats.table, device_form=all_zero.on_device)
                samples.append(Sample("grads.zero", step, value, labels, detail=zeros))
            else:
                samples.append(_without_gradient(stats.norms, facts.names, step, labels))
        if "grad.layer_ratio" in demand.due_now:
            ends = _first_and_last_matrix(params, stats.indices)
            if ends is not None:
                first, last = (stats.element("norm", k) for k in ends)
                samples.append(Sample("grad.layer_ratio", step, Late(_quotient, first, last), labels))
        return samples

    def _host_samples(
        self,
        event: Event,
        demand: Demand,
        params: Sequence[Any],
        all_names: Sequence[str],
        stats: GradientStats,
        labels: Labels,
        given: Any,
    ) -> list[Sample]:
        norms, step = stats.norms, event.step
        total = float(norm_of(norms))
        if event.kind is EventKind.BEFORE_UPDATE or given is not None:
            scale, clip = self._pending_scale(event), _clipped_by(event, given)
            factor = _undo(1.0, None if scale is None else float(scale), given, clip)
            total, norms = total * factor, norms * factor
        detail: Callable[[], dict[str, Any]]
        if math.isfinite(total):
            detail = facts_of_norms(norms, all_names, stats.indices)
        else:
            facts = bad_gradient_facts([(all_names[i], params[i]) for i in stats.indices])
            detail = lambda: facts  # noqa: E731
            self._recent.remember(step, detail)
        samples = [Sample("grad_norm", step, _better_norm(given, total), labels, detail=detail)]
        if self._norm_only:
            return samples
        if "grad_norm[]" in demand.due_now:
            own = self._family_labels(labels, all_names, stats.indices)
            for label, value in zip(own, norms.tolist(), strict=True):
                samples.append(Sample("grad_norm", step, value, label, detail=detail))
        if "grad_nonfinite" in demand.due_now:
            count = 0.0  # a finite norm proves it
            if not math.isfinite(total):
                count = scalar(nonfinite_count([params[i].grad for i in stats.indices]))
            samples.append(Sample("grad_nonfinite", step, count, labels, detail=detail))
        if "grads.zero" in demand.due_now:
            samples.append(_without_gradient(norms, [all_names[i] for i in stats.indices], step, labels))
        if "grad.layer_ratio" in demand.due_now:
            ends = _first_and_last_matrix(params, stats.indices)
            if ends is not None and float(norms[ends[1]]) > 0:
                samples.append(Sample("grad.layer_ratio", step, scalar(norms[ends[0]] / norms[ends[1]]), labels))
        return samples

    def _family_labels(self, labels: Labels, named: Sequence[str], indices: list[int]) -> list[Labels]:
        """Labels of the per-parameter series, made once per set of parameters."""
        names = [named[i] for i in indices]
        known = self._labels.get(labels)
        if known is None or known[0] != names:
            known = self._labels[labels] = (names, [with_label(labels, "parameter", name) for name in names])
        return known[1]

    @staticmethod
    def _pending_scale(event: Event) -> Any:
        """The loss scale that a fused optimizer will take out of the gradients itself, else None."""
        if event.kind is not EventKind.BEFORE_UPDATE:
            return None
        return getattr(event.optimizer, "grad_scale", None)


def _without_gradient(norms: Any, names: list[str], step: int, labels: Labels) -> Sample:
    zero = norms == 0
    zero &= zero[silent_together(names)]
    return Sample("grads.zero", step, scalar(zero.sum()), labels, detail=lambda: zero_facts(zero.tolist(), names))


def _clipped_by(event: Event, given: Any) -> float | None:
    """The threshold by which gradients that are read late were clipped; ``given`` is the norm before."""
    if event.kind is not EventKind.BEFORE_UPDATE or given is None:
        return None
    return event.max_norm


def _undo(norm: float, scale: float | None, given: float | None, clip: float | None) -> float:
    """A norm without the pending loss scale, or else without the clipping."""
    if scale is not None:
        return norm / scale
    if clip is not None and given is not None:
        ratio = (given + 1e-6) / clip
        if math.isfinite(ratio) and ratio > 1.0:
            return norm * ratio
    return norm


def _late_norm(own: Element, given: Any, scale: Any, clip: float | None) -> Element | Late:
    """The loop's norm where it has one, else ours with scale and clipping taken out."""
    if scale is not None:
        if given is None:
            return Late(lambda norm, s: norm / s, own, scale)
        return Late(lambda norm, s, known: _better_norm(known, norm / s), own, scale, given)
    if given is None:
        return own
    return Late(lambda norm, known: _better_norm(known, _undo(norm, None, known, clip)), own, given)


def _quotient(first: float, last: float) -> float:
    return first / last if last > 0 or math.isnan(last) else math.inf


def _first_and_last_matrix(params: Sequence[Any], indices: list[int]) -> tuple[int, int] | None:
    matrices = [k for k, i in enumerate(indices) if params[i].dim() > 1]
    return (matrices[0], matrices[-1]) if len(matrices) > 1 else None


def _better_norm(given: float | None, own: float) -> float:
    """The loop's norm, except where only its float32 overflowed."""
    if given is None:
        return own
    return own if not math.isfinite(given) and math.isfinite(own) else given
