"""Do the weights move, how far, and do updates survive rounding? From sampled elements."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.names import in_groups
from healthcheck.probes.optimizer.learning_rate import rates_of
from healthcheck.probes.transfer.late import LateTable
from healthcheck.probes.values import GRADIENT, on_host, optimizer_labels, scalar, with_label
from healthcheck.probes.weights.moved import Moved, Streaks
from healthcheck.probes.weights.sampling import ElementSampler, SampledRows
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Cost, Labels, Metric, Sample

PATIENCE = 5
"""Updates that a tensor may stand still before it counts as unmoved."""

FADED = 1e-3
"""Part of its highest value under which a learning rate has faded out."""

NEGLIGIBLE = 1e-6
"""Part of the largest gradient under which an element's own is noise."""

_KEYS = ("update_ratio", "update_ratio[]", "updates.lost", "params.unmoved")


@dataclass(slots=True)
class _Watched:
    """What is remembered of one optimizer."""

    optimizer: Callable[[], Any]
    """A weak reference: a replaced optimizer must not live on because we looked at it."""
    names: list[str]
    rates: list[float]
    peaks: list[float]
    """Highest learning rate that each parameter had so far."""
    low: list[bool]
    sampler: ElementSampler
    before: list[SampledRows] | None = None
    gradients: list[SampledRows] | None = None
    without: list[bool] = field(default_factory=list)
    """Which tensors have no gradient; none of them while tensors take turns."""
    absent: list[int] | None = None
    """What identifies the state of those without a gradient at the look before: torch's version number, else -1."""
    turns: bool = False
    """Tensors take turns in getting gradients, as heads and experts do: that one has none says nothing."""
    streaks: list[Any] = field(default_factory=list)
    late: Streaks = field(default_factory=lambda: Streaks(0, NEGLIGIBLE))
    """The same where the device sums up and the host counts."""
    checks: int = 0


class MovementProbe:
    """Compares a few elements of each parameter just before and just after the update.

    A tensor is *unmoved* if none of its elements changed in five checked updates although its
    learning rate was above zero (and above a thousandth of its highest: a schedule that fades out may
    round to nothing) and there was something to apply: a finite gradient that is not
    zero at these elements nor noise against the others, or no gradient at all at any look. Tensors frozen with ``requires_grad=False``,
    rows of an embedding that no batch used, and updates that a ``GradScaler`` skipped are none.
    """

    name = "movement"
    stretchable = ("update_ratio", "update_ratio[]", "updates.lost", "params.unmoved")
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric("update_ratio", "|dW| / |W| of the update over all trainable parameters.", cost=Cost.DEVICE),
        Metric("update_ratio", "|dW| / |W| of one parameter.", cost=Cost.DEVICE, labels=("parameter",)),
        Metric(
            "updates.lost",
            "Part of the elements of bf16 and fp16 weights whose update rounded to nothing.",
            "fraction",
            Cost.DEVICE,
            needs=("half precision weights",),
        ),
        Metric(
            "params.unmoved",
            f"Trainable tensors that did not change in {PATIENCE} updates although lr > 0.",
            cost=Cost.DEVICE,
        ),
    )

    def __init__(self) -> None:
        self._known: dict[int, _Watched] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.optimizer is None or event.model is None:
            return ()
        if event.kind is EventKind.BEFORE_UPDATE:
            if any(demand.due(key, event.step) for key in _KEYS):
                self._look_before(event, demand)
            return ()
        seen = self._known.get(event.optimizer_index)
        if seen is None or seen.before is None or seen.optimizer() is not event.optimizer:
            return ()
        before, seen.before = seen.before, None
        if event.skipped:
            return ()
        return list(self._compare(event, demand, seen, before))

    def _look_before(self, event: Event, demand: Demand) -> None:
        seen = self._watch(event)
        seen.rates = rates_of(event.optimizer, seen.sampler.params)
        seen.peaks = list(map(max, seen.rates, seen.peaks))
        seen.before = seen.sampler.weights("before")
        seen.gradients = None
        if demand.wants("params.unmoved") or (demand.wants("updates.lost") and any(seen.low)):
            params = seen.sampler.params
            gradients = list(map(GRADIENT, params))
            seen.gradients = seen.sampler.gradients(of=gradients)
            # A tensor without a gradient now that had one at the look before, or was changed since, has its turns.
            absent = [-1 if gradient is not None else p._version for p, gradient in zip(params, gradients, strict=True)]
            seen.turns = seen.turns or (seen.absent is not None and absent != seen.absent)
            seen.absent = absent
            seen.without = [version >= 0 and not seen.turns for version in absent]

    def _watch(self, event: Event) -> _Watched:
        assert event.model is not None
        params = [p for group in event.optimizer.param_groups for p in group["params"] if p.requires_grad]
        seen = self._known.get(event.optimizer_index)
        if seen is not None and seen.optimizer() is event.optimizer and _same(params, seen.sampler.params):
            return seen
        self._known = {k: w for k, w in self._known.items() if w.optimizer() is not None}
        by_id = {id(p): name for name, p in event.model.named_parameters()}
        names = [by_id.get(id(p), f"param{i}") for i, p in enumerate(params)]
        low = [p.is_floating_point() and p.element_size() == 2 for p in params]
        seen = _Watched(weak(event.optimizer), names, [], [0.0] * len(params), low, ElementSampler(params))
        self._known[event.optimizer_index] = seen
        return seen

    def _compare(self, event: Event, demand: Demand, seen: _Watched, before: list[SampledRows]) -> Iterable[Sample]:
        import torch

        labels, step = optimizer_labels(event.optimizer_index), event.step
        vectors = seen.sampler.compare(before, seen.gradients)
        if vectors is not None:
            tables = Moved([LateTable(vector) for vector in vectors], seen.sampler.groups)
            yield from self._late_samples(demand, seen, tables, labels, step)
            return
        after = seen.sampler.weights("after")
        moved = [(new.indices, new.values - old.values, old.values) for new, old in zip(after, before, strict=True)]
        if demand.due("update_ratio", step) or demand.due("update_ratio[]", step):
            yield from self._ratios(torch, seen, moved, labels, step, demand)
        if seen.gradients is None:
            return
        active = [
            (delta, rows.values.isfinite() & (rows.values != 0))
            for (_, delta, _), rows in zip(moved, seen.gradients, strict=True)
        ]
        if demand.due("updates.lost", step) and any(seen.low):
            share = self._lost(torch, seen, active)
            if share is not None:
                yield Sample("updates.lost", step, share, labels)
        if demand.due("params.unmoved", step):
            yield from self._unmoved(torch, seen, _sizeable(torch, seen.gradients, active), labels, step)

    def _late_samples(
        self, demand: Demand, seen: _Watched, moved: Moved, labels: Labels, step: int
    ) -> Iterable[Sample]:
        """On a device: one launch has summed up each tensor, the host does the rest when the numbers are there."""
        if demand.due("update_ratio[]", step):
            for index, ratio in moved.each_ratio():
                if seen.rates[index] != 0.0:
                    yield Sample("update_ratio", step, ratio, with_label(labels, "parameter", seen.names[index]))
        if demand.due("update_ratio", step):
            sizes = [seen.sampler.sizes(group) for group in seen.sampler.groups]
            yield Sample("update_ratio", step, moved.ratio(sizes), labels)
        if seen.gradients is None:
            return
        if demand.due("updates.lost", step) and any(seen.low):
            counts = [low and rate != 0.0 for low, rate in zip(seen.low, seen.rates, strict=True)]
            yield Sample("updates.lost", step, moved.lost(counts), labels)
        if demand.due("params.unmoved", step):
            seen.checks += 1
            if not seen.late.values:
                seen.late = Streaks(len(seen.names), NEGLIGIBLE)
            seen.late.add(moved, seen.without, _moving(seen))
            if seen.checks >= PATIENCE:
                count, which = seen.late.standing(PATIENCE)
                names = seen.names

                def facts() -> Mapping[str, Any]:
                    hit = [names[index] for index in which()]
                    tensors = f"{len(hit):,} of {len(names):,} trainable tensors"
                    return {"which": in_groups(hit, names), "tensors": tensors}

                yield Sample("params.unmoved", step, count, labels, detail=facts)

    def _ratios(
        self, torch: Any, seen: _Watched, moved: list[Any], labels: Labels, step: int, demand: Demand
    ) -> Iterable[Sample]:
        change, size = [], []
        for indices, delta, old in moved:
            stands_for = torch.tensor(seen.sampler.sizes(indices), dtype=delta.dtype, device="cpu")
            stands_for = stands_for.to(delta.device, non_blocking=True)
            squares, olds = delta.square().sum(1), old.square().sum(1)
            change.append((squares * stands_for).sum())
            size.append((olds * stands_for).sum())
            if demand.due("update_ratio[]", step):
                ratios = _ratio(torch, squares, olds)
                values = ratios.tolist() if on_host(ratios) else ratios.unbind()
                for index, value in zip(indices, values, strict=True):
                    if seen.rates[index] != 0.0:
                        yield Sample("update_ratio", step, value, with_label(labels, "parameter", seen.names[index]))
        if change and demand.due("update_ratio", step):
            home = change[0].device
            total = [torch.stack([part.to(home, torch.float32) for part in parts]).sum() for parts in (change, size)]
            yield Sample("update_ratio", step, scalar(_ratio(torch, *total)), labels)

    @staticmethod
    def _lost(torch: Any, seen: _Watched, active: list[Any]) -> Any:
        lost, asked = [], []
        for group, (delta, mask) in zip(seen.sampler.groups, active, strict=True):
            counts = [seen.low[i] and seen.rates[i] != 0.0 for i in group]
            mask = mask & _column(torch, counts, delta.device)
            lost.append((mask & (delta == 0)).sum())
            asked.append(mask.sum())
        home = lost[0].device
        total = torch.stack([part.to(home) for part in asked]).sum()
        if on_host(total) and int(total) == 0:
            return None
        gone = torch.stack([part.to(home) for part in lost]).sum()
        return scalar(gone / total.clamp(min=1))

    def _unmoved(self, torch: Any, seen: _Watched, active: list[Any], labels: Labels, step: int) -> Iterable[Sample]:
        seen.checks += 1
        if not seen.streaks:
            seen.streaks = [
                torch.zeros(len(g), device=d.device) for g, (d, _) in zip(seen.sampler.groups, active, strict=True)
            ]
        for k, (group, (delta, mask)) in enumerate(zip(seen.sampler.groups, active, strict=True)):
            none = _column(torch, [seen.without[i] for i in group], delta.device)[:, 0]
            moves = _moving(seen)
            rate = _column(torch, [moves[i] for i in group], delta.device)[:, 0]
            still = (delta == 0).all(1)
            due = (mask.any(1) | none) & rate
            streak = seen.streaks[k]
            seen.streaks[k] = torch.where(still, torch.where(due, streak + 1, streak), torch.zeros_like(streak))
        if seen.checks < PATIENCE or not seen.streaks:
            return
        home = seen.streaks[0].device
        count = torch.stack([(s >= PATIENCE).sum().to(home) for s in seen.streaks]).sum()
        streaks, groups, names = list(seen.streaks), seen.sampler.groups, seen.names

        def facts() -> Mapping[str, Any]:
            hit = [
                names[index]
                for group, streak in zip(groups, streaks, strict=True)
                for index, value in zip(group, streak.tolist(), strict=True)
                if value >= PATIENCE
            ]
            return {"which": in_groups(hit, names), "tensors": f"{len(hit):,} of {len(names):,} trainable tensors"}

        yield Sample("params.unmoved", step, scalar(count), labels, detail=facts)


def _moving(seen: _Watched) -> list[bool]:
    """Which tensors have a learning rate that should move them."""
    return [rate > FADED * peak for rate, peak in zip(seen.rates, seen.peaks, strict=True)]


def _sizeable(torch: Any, gradients: list[SampledRows], active: list[Any]) -> list[Any]:
    """Without elements whose gradient is next to nothing against the largest: a bias in front of a normalisation."""
    sizes = [torch.where(mask, rows.values.abs(), 0.0) for rows, (_, mask) in zip(gradients, active, strict=True)]
    if not sizes:
        return active
    home = sizes[0].device
    largest = torch.stack([size.amax().to(home, torch.float32) for size in sizes]).amax()
    return [
        (delta, mask & (size > NEGLIGIBLE * largest.to(size.device)))
        for size, (delta, mask) in zip(sizes, active, strict=True)
    ]


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _ratio(torch: Any, change: Any, size: Any) -> Any:
    """sqrt(change / size); a tensor that was all zero and moved counts as 1, one that stayed as 0."""
    base = torch.where(size > 0, size, torch.where(change > 0, change, torch.ones_like(size)))
    return (change / base).sqrt()


def _column(torch: Any, flags: list[bool], device: Any) -> Any:
    return torch.tensor(flags, dtype=torch.bool).to(device, non_blocking=True)[:, None]
