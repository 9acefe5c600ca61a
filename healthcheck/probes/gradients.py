"""Gradient norms before clipping, non-finite gradients, and who carries them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.blame import BAD_GRADIENTS, bad_gradient_facts
from healthcheck.probes.gradstats import GradientStats, gradient_stats, nonfinite_count
from healthcheck.probes.names import first_few
from healthcheck.probes.values import on_host, optimizer_labels, scalar, with_label
from healthcheck.protocols import Demand
from healthcheck.samples import Cost, Labels, Metric, Sample

Named = Sequence[tuple[str, Any]]


class GradientProbe:
    """One pass over the gradients per step, as early as they can be read unscaled.

    Without a loss scale that is the end of the backward pass: clipping multiplies every gradient
    by the same number, so that afterwards one NaN has become all NaN. Under a ``GradScaler`` it is
    the moment before the update, when gradients are unscaled. Where the loop clips, its own norm
    is the norm before clipping.
    """

    name = "gradients"
    listens_to: tuple[EventKind, ...] = (
        EventKind.BACKWARD_END,
        EventKind.BEFORE_UPDATE,
        EventKind.AFTER_UPDATE,
        EventKind.STEP_END,
    )
    provides: tuple[Metric, ...] = (
        Metric("grad_norm", "Global L2 norm of the gradients before clipping.", cost=Cost.DEVICE),
        Metric("grad_norm", "L2 norm of one parameter's gradient.", cost=Cost.DEVICE, labels=("parameter",)),
        Metric("grad_nonfinite", "Gradient elements that are NaN or infinite.", cost=Cost.DEVICE),
        Metric("grads.zero", "Trainable tensors whose gradient is exactly zero.", cost=Cost.DEVICE),
        Metric(
            "grad.layer_ratio",
            "Gradient norm of the first weight matrix divided by that of the last.",
            cost=Cost.DEVICE,
        ),
    )

    def __init__(self) -> None:
        self._given: dict[int, int] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if self._given.get(event.optimizer_index) == event.step:
            return ()
        if event.kind is EventKind.BACKWARD_END and event.loss_scale is not None:
            return ()
        labels = optimizer_labels(event.optimizer_index)
        if event.kind in (EventKind.AFTER_UPDATE, EventKind.STEP_END):
            # Gradients may be gone or belong to a skipped step; only the loop's own norm is sure.
            norm = scalar(event.grad_norm) if not event.skipped else None
            if norm is None:
                return ()
            self._given[event.optimizer_index] = event.step
            return (Sample("grad_norm", event.step, norm, labels),)
        named = self._trainable(event)
        stats = gradient_stats([p for _, p in named]) if named else None
        if stats is None:
            return ()
        self._given[event.optimizer_index] = event.step
        return list(self._samples(event, demand, named, stats, labels))

    def _trainable(self, event: Event) -> Named:
        if event.model is None:
            return ()
        named = event.model.named_parameters()
        optimizers = event.model.optimizers()
        if len(optimizers) < 2:
            return named
        # With several optimizers the others' gradients are leftovers or by-products.
        optimizer = event.optimizer
        if optimizer is None and event.optimizer_index < len(optimizers):
            optimizer = optimizers[event.optimizer_index]
        if optimizer is None:
            return named
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [pair for pair in named if id(pair[1]) in own]

    def _samples(
        self, event: Event, demand: Demand, named: Named, stats: GradientStats, labels: Labels
    ) -> Iterable[Sample]:
        total, norms = stats.total, stats.norms
        given = scalar(event.grad_norm)
        undo = self._undo(event, given)
        if undo is not None:
            norms = norms * undo
            total = total * undo
        host = on_host(total)
        if host:
            total = float(total)
        detail: Callable[[], dict[str, Any]] | None
        if host and not math.isfinite(total):
            facts = bad_gradient_facts([named[i] for i in stats.indices])
            event.user_state[BAD_GRADIENTS] = (event.step, facts)
            detail = lambda: facts  # noqa: E731
        else:
            detail = _facts_of_norms(norms, [named[i][0] for i in stats.indices])
        yield Sample("grad_norm", event.step, _better_norm(given, total), labels, detail=detail)
        if demand.due("grad_norm[]", event.step):
            values = norms.tolist() if host else norms.unbind()
            for index, value in zip(stats.indices, values, strict=True):
                own = with_label(labels, "parameter", named[index][0])
                yield Sample("grad_norm", event.step, value, own, detail=detail)
        if demand.wants("grad_nonfinite"):
            count = self._nonfinite(named, stats, total if host else None)
            yield Sample("grad_nonfinite", event.step, count, labels, detail=detail)
        if demand.wants("grads.zero"):
            zero = norms == 0
            names = [named[i][0] for i in stats.indices]
            yield Sample("grads.zero", event.step, scalar(zero.sum()), labels, detail=lambda: _zero_facts(zero, names))
        if demand.wants("grad.layer_ratio"):
            matrices = [k for k, i in enumerate(stats.indices) if named[i][1].dim() > 1]
            if len(matrices) > 1:
                first, last = norms[matrices[0]], norms[matrices[-1]]
                if not host or float(last) > 0:
                    yield Sample("grad.layer_ratio", event.step, scalar(first / last), labels)

    @staticmethod
    def _undo(event: Event, given: Any) -> Any:
        """What takes clipping and a fused optimizer's pending scale out of gradients read late."""
        if event.kind is not EventKind.BEFORE_UPDATE:
            return None
        scale = getattr(event.optimizer, "grad_scale", None)  # set while a GradScaler drives a fused step
        if scale is not None:
            return 1.0 / scale
        if given is None or event.max_norm is None:
            return None
        ratio = (given + 1e-6) / event.max_norm
        if on_host(ratio):
            return ratio if math.isfinite(ratio) and ratio > 1.0 else None
        import torch

        return torch.where(torch.isfinite(ratio), ratio.clamp(min=1.0), torch.ones_like(ratio))

    @staticmethod
    def _nonfinite(named: Named, stats: GradientStats, total: float | None) -> Any:
        """Element count. On the host a finite norm proves that it is zero."""
        if total is not None and math.isfinite(total):
            return 0.0
        return scalar(nonfinite_count([named[i][1].grad for i in stats.indices]))


def _better_norm(given: Any, own: Any) -> Any:
    """The loop's norm, except where only its float32 overflowed."""
    if given is None:
        return own
    if on_host(given) and on_host(own):
        return own if not math.isfinite(given) and math.isfinite(own) else given
    import torch

    given, own = (torch.as_tensor(x, dtype=torch.float64 if not on_host(own) else None) for x in (given, own))
    given = given.to(own.device)
    return torch.where(torch.isfinite(given) | ~torch.isfinite(own), given, own)


def _facts_of_norms(norms: Any, names: list[str]) -> Callable[[], dict[str, Any]]:
    """Facts read from the norms when an alert asks: the bad ones, else the largest."""

    def facts() -> dict[str, Any]:
        values = norms.tolist()
        bad = [name for name, value in zip(names, values, strict=True) if not math.isfinite(value)]
        if bad:
            return {"first": bad[0], "tensors": f"{len(bad):,} of {len(names):,} gradients not finite"}
        largest = max(range(len(values)), key=values.__getitem__)
        return {"largest": f"{names[largest]}, norm {values[largest]:.3g}"}

    return facts


def _zero_facts(zero: Any, names: list[str]) -> dict[str, Any]:
    hit = [name for name, flag in zip(names, zero.tolist(), strict=True) if flag]
    return {"which": first_few(hit), "tensors": f"{len(hit):,} of {len(names):,} gradients exactly zero"}
