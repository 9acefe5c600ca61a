"""Gradient norms before clipping, gradients that are not finite or exactly zero, and who carries them."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.references import weak
from healthcheck.core.samples import Cost, Labels, Metric, Sample
from healthcheck.device.deferred import calculate, number, quotient, value_of, values_of
from healthcheck.device.tensors import nonfinite_counts, plain_values
from healthcheck.probes.gradient_statistics import GradientPass, GradientStats, InnerPass, gradient_stats
from healthcheck.probes.labels import first_few, optimizer_labels, with_label

_KEPT = 32
"""Steps whose facts are kept: values from a device arrive that much later at most, or nearly so."""


class RecentGradients:
    """What is known of the gradients of the last steps, for the messages of other rules.

    One for the probes of a session: that of the gradients fills it, that of the loss reads it.
    """

    def __init__(self) -> None:
        self._facts: dict[int, Callable[[], Mapping[str, Any]]] = {}

    def remember(self, step: int, facts: Callable[[], Mapping[str, Any]]) -> None:
        """:param facts: called when a message needs them; must speak of that step, as the gradients were
        before clipping spread a NaN over all parameters.
        """
        self._facts[step] = facts
        # Steps come in order, so the first key is the oldest.
        if len(self._facts) > _KEPT:
            del self._facts[next(iter(self._facts))]

    def of(self, step: int) -> Callable[[], Mapping[str, Any]] | None:
        """The facts of a step, None if there are none (any more)."""
        return self._facts.get(step)


def bad_gradient_facts(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """``{"first": "head.scale, 1 of 64 values", "tensors": "1 of 24 gradients not finite"}``.

    ``first`` is the first in the order of the model, which need not be where it began.
    """
    with_gradient = [(name, p.grad) for name, p in named if p.grad is not None]
    return _facts(with_gradient, "gradients")


def bad_weight_facts(named: Iterable[tuple[str, Any]]) -> str:
    """``finite``, or ``3 of 24 tensors not finite, first head.weight``."""
    facts = _facts([(name, p) for name, p in named], "tensors")
    return f"{facts['tensors']}, first {facts['first']}" if facts else "finite"


def loss_facts(
    named: Sequence[tuple[str, Any]],
    known: Callable[[], Mapping[str, Any]] | None,
    *,
    late: bool = False,
    batch: Sequence[tuple[str, Any]] = (),
    cause: str = "",
) -> dict[str, Any]:
    """What is known beside a non-finite loss: bad inputs, bad gradients of that step, state of the weights.

    :param known: what is known of the gradients of that step (:class:`RecentGradients`).
    :param late: the loss came from a device; the gradients that are there now are of a later step.
    :param batch: tensors of that step's batch, by name.
    :param cause: what the graph of the loss showed.
    """
    facts: dict[str, Any] = {"cause": cause} if cause else {}
    bad_input = _facts([(name, tensor) for name, tensor in batch if tensor.is_floating_point()], "tensors")
    if bad_input:
        facts["input"] = f"the batch itself is not finite: {bad_input['first']}"
    if known is not None:
        # Statistics of that very step, even if its gradients are long overwritten.
        facts |= {key: value for key, value in known().items() if key != "largest"}
    elif not late:
        facts |= bad_gradient_facts(named)
    facts["weights"] = bad_weight_facts(named)
    return facts


def _facts(named: Sequence[tuple[str, Any]], what: str) -> dict[str, Any]:
    import torch

    first, bad = "", 0
    with waiting_allowed():
        for name, tensor in named:
            # Some types and layouts cannot be asked for finiteness; what they hold stays unknown.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                values = plain_values(tensor)[0]
                count = int((~torch.isfinite(values)).sum())
                if count:
                    bad += 1
                    first = first or f"{name}, {count:,} of {values.numel():,} values"
    return {"first": first, "tensors": f"{bad:,} of {len(named):,} {what} not finite"} if bad else {}


@contextlib.contextmanager
def waiting_allowed() -> Iterator[None]:
    """For reads after a hit: a script that makes waits an error means its own, and those of healthy steps."""
    import torch

    if not torch.cuda.is_initialized():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    if not mode:  # nothing to allow, and setting it makes torch warn
        yield
        return
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class GradientFacts:
    """Facts for a message, from the statistics that came with the value: of its step, not of a later one.

    :param names: of all parameters, also of those without a gradient.
    :param factor: takes out of a norm what clipping or a loss scale did to it.
    """

    __slots__ = ("_all_names", "_factor", "_stats")

    def __init__(self, stats: GradientStats, names: Sequence[str], factor: Any = None) -> None:
        self._stats = stats
        self._all_names = names
        self._factor = factor

    @property
    def names(self) -> list[str]:
        """Of the parameters with a gradient."""
        return [self._all_names[i] for i in self._stats.indices]

    def __call__(self) -> dict[str, Any]:
        """``first`` of the gradients that are not finite and how many ``tensors`` they are, else the ``largest``."""
        stats, names = self._stats, self.names
        numbers = values_of(stats.numbers)
        norms = stats.row_of(numbers, "norm")
        bad = [k for k, norm in enumerate(norms) if not math.isfinite(norm)]
        if bad:
            first = names[bad[0]]
            if stats.has("nonfinite"):
                count = numbers[stats.position("nonfinite", bad[0])]
                first += f", {count:,.0f} of {stats.lengths[bad[0]]:,} values"
            return {"first": first, "tensors": f"{len(bad):,} of {len(names):,} gradients not finite"}
        k = max(range(len(norms)), key=norms.__getitem__)
        norm = norms[k] * (1.0 if self._factor is None else value_of(self._factor))
        return {"largest": f"{names[k]}, norm {norm:.3g}"}

    def zero(self) -> dict[str, Any]:
        """Which gradients were exactly zero."""
        names = self.names
        hit = [name for name, flag in zip(names, self._zero_flags(values_of(self._stats.numbers)), strict=True) if flag]
        return {"which": first_few(hit), "tensors": f"{len(hit):,} of {len(names):,} gradients exactly zero"}

    def zero_count(self, numbers: Sequence[float]) -> float:
        """How many gradients were exactly zero, from the numbers of the statistics."""
        return float(sum(self._zero_flags(numbers)))

    def zero_count_on_device(self, vector: Any) -> Any:
        """About the same for a gate: a bias counts by itself here."""
        first = len(self._stats.fields)  # norms are the first row behind the totals
        return (vector[first : first + len(self._stats.indices)] == 0).sum()

    def _zero_flags(self, numbers: Sequence[float]) -> list[bool]:
        norms = self._stats.row_of(numbers, "norm")
        # Nearly always so, and found out in C.
        if 0.0 not in norms:
            return [False] * len(norms)
        return [norm == 0 == norms[k] for norm, k in zip(norms, _with_weight(self.names), strict=True)]


def _with_weight(names: Sequence[str]) -> list[int]:
    """Which tensor must be without a gradient, too, for each to count: of a bias, the weight of its layer.

    The gradient of a bias cancels where the loss does not change when all answers are shifted (the difference of two
    means, a distance, a softmax). A layer whose weight gets a gradient is not dead.
    """
    index = {name: k for k, name in enumerate(names)}
    found = []
    for k, name in enumerate(names):
        layer, dot, own = name.rpartition(".")
        found.append(index.get(layer + dot + own.replace("bias", "weight"), k))
    return found


# --------------------------------------------------------------------------------------------------
# Gradient norms before clipping, gradients that are not finite or exactly zero, and who carries them.


LOOK_EVERY = 50
"""Steps between two full looks at a model whose one optimizer holds all that is trained."""


_PARAMS = operator.itemgetter("params")


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
        self._optimizer: Any = lambda: None
        self._lists: tuple[list[int], list[int]] = ([], [])
        """Identities and lengths of the optimizer's lists at the last full look."""
        self._ends: tuple[Any, Any] = (None, None)
        self._order: list[int] | None = None
        self._age = LOOK_EVERY

    def of(self, event: Event) -> list[Any]:
        """The parameters, alive while the caller holds them."""
        if event.model is None:
            return []
        optimizer = self._optimizer()  # None where several share the model; whoever else steps asks for a full look
        if optimizer is not None and self._age < LOOK_EVERY and event.optimizer in (None, optimizer):
            self._age += 1
            lists = list(map(_PARAMS, optimizer.param_groups))
            flat = lists[0] if len(lists) == 1 else [p for params in lists for p in params]
            # Who replaces parameters in place keeps lists and their lengths: the ends catch most of that, and the full look
            # every LOOK_EVERY steps the rest.
            first, last = self._ends
            if (
                flat
                and first() is flat[0]
                and last() is flat[-1]
                and self._lists == (list(map(id, lists)), list(map(len, lists)))
            ):
                return flat if self._order is None else [flat[i] for i in self._order]
        return self._look(event, event.model.optimizers())

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
        self._optimizer, self._age = lambda: None, LOOK_EVERY
        if len(optimizers) == 1:
            flat = [p for group in optimizers[0].param_groups for p in group["params"]]
            places = {id(p): place for place, p in enumerate(flat)}
            trained = [(name, p) for name, p in named if id(p) in places]
            if flat and len(trained) == len(flat) and all(p.grad is None for p in params if id(p) not in places):
                names, params = [name for name, _ in trained], [p for _, p in trained]
                order = [places[id(p)] for p in params]
                self._order = None if order == list(range(len(flat))) else order
                self._optimizer = weak(optimizers[0])
                lists = list(map(_PARAMS, optimizers[0].param_groups))
                self._lists = (list(map(id, lists)), list(map(len, lists)))
                self._ends = (weak(flat[0]), weak(flat[-1]))
                self._age = 0
        # The same list object while nothing changes: callers compare it instead of a thousand names.
        ids = list(map(id, params))
        if ids != self._ids or names != self.names:
            self._ids, self.names = ids, names
        return params


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
        """Step of the last answer, by optimizer."""
        self._trained = TrainedParameters()
        self._passes: dict[int, GradientPass] = {}
        self._labels: dict[Labels, tuple[list[str], list[Labels]]] = {}
        self._besides: tuple[str, ...] = _BESIDES
        """What is wanted besides the norm of all."""

    def plan(self, demand: Demand) -> None:
        self._besides = tuple(key for key in _BESIDES if demand.wants(key))

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        index = event.optimizer_index
        if self._given.get(index) == event.step:
            return ()
        before_update = event.kind is EventKind.BEFORE_UPDATE
        if not before_update:
            if event.kind is not EventKind.BACKWARD_END:
                return self._afterwards(event, demand)
            # Still multiplied with the loss scale: wait until they are unscaled, before the update.
            if event.loss_scale is not None:
                return ()
        params = self._trained.of(event)
        if not params:
            return ()
        names, kept = self._trained.names, event.kept_gradients
        # On a CPU nothing can be prepared from step to step.
        if params[0].is_cpu:
            stats = gradient_stats(params, kept)
        else:
            known = self._passes.get(index)
            if known is None:
                known = self._passes[index] = GradientPass()
            stats = known.measure(params, names, kept)
        if stats is None:
            return ()
        self._given[index] = event.step
        given = None if event.grad_norm is None else number(event.grad_norm)
        factor = _to_undo(event, given) if before_update else None
        return self._samples(event, demand, params, names, stats, given, factor)

    def _afterwards(self, event: Event, demand: Demand) -> Iterable[Sample]:
        """After the update gradients may be gone or belong to a skipped step; only these are sure: statistics of those
        that were used inside the backward pass, and the loop's own norm."""
        inner: InnerPass | None = event.inner_gradients
        if inner is not None and inner.step == event.step:
            self._given[event.optimizer_index] = event.step
            return self._samples(event, demand, inner.parameters, inner.names, inner.statistics, None, None)
        norm = number(event.grad_norm) if not event.skipped else None
        if norm is None:
            return ()
        self._given[event.optimizer_index] = event.step
        return (Sample("grad_norm", event.step, norm, optimizer_labels(event.optimizer_index)),)

    def _samples(
        self,
        event: Event,
        demand: Demand,
        params: Sequence[Any],
        names: list[str],
        stats: GradientStats,
        given: Any,
        factor: Any,
    ) -> list[Sample]:
        """Of the statistics of one optimizer's gradients.

        :param given: the norm that the loop computed itself, or None.
        :param factor: takes clipping or a loss scale out of a norm; None where there is nothing to take out.
        """
        step, labels = event.step, optimizer_labels(event.optimizer_index)
        facts = GradientFacts(stats, names, factor)
        norm = stats.norm if factor is None else stats.norm * factor
        known = type(norm) is float
        if not known or not math.isfinite(norm):
            # On a device nobody knows yet whether they are finite: the facts are kept either way, and cost nothing unread.
            self._recent.remember(step, facts)
        value = norm if given is None else _better_norm(given, norm)
        samples = [Sample("grad_norm", step, value, labels, detail=facts)]
        for key in self._besides:
            if key not in demand.due_now:
                continue
            if key == "grads.zero":
                zero = calculate(facts.zero_count, stats.numbers, on_device=facts.zero_count_on_device)
                samples.append(Sample(key, step, zero, labels, detail=facts.zero))
            elif key == "grad_nonfinite":
                if stats.has("nonfinite"):
                    count = stats.number("nonfinite")
                elif known:
                    count = 0.0  # a finite norm proves it
                else:
                    count = nonfinite_counts([params[i].grad for i in stats.indices]).sum()
                samples.append(Sample(key, step, count, labels, detail=facts))
            elif key == "grad_norm[]":
                for label, own in zip(self._family_labels(labels, facts.names), stats.row("norm"), strict=True):
                    value = own if factor is None else own * factor
                    samples.append(Sample("grad_norm", step, value, label, detail=facts))
            else:
                matrices = [k for k, i in enumerate(stats.indices) if params[i].dim() > 1]
                if len(matrices) > 1:
                    ends = stats.number("norm", matrices[0]), stats.number("norm", matrices[-1])
                    ratio = calculate(_layer_ratio, *ends)
                    if ratio is not None:
                        samples.append(Sample(key, step, ratio, labels))
        return samples

    def _family_labels(self, labels: Labels, names: list[str]) -> list[Labels]:
        """Labels of the per-parameter series, made once per set of parameters."""
        known = self._labels.get(labels)
        if known is None or known[0] != names:
            known = self._labels[labels] = (names, [with_label(labels, "parameter", name) for name in names])
        return known[1]


def _to_undo(event: Event, given: Any) -> Any:
    """What gradients just before an update have to be multiplied with, or None.

    They are divided by the loss scale that a fused optimizer will take out itself, or else multiplied with what
    clipping took away; ``given`` is the loop's norm before clipping.
    """
    scale = getattr(event.optimizer, "grad_scale", None)
    if scale is not None:
        return quotient(1.0, number(scale))
    if given is None or event.max_norm is None:
        return None
    return calculate(_clipped_by, given, event.max_norm, on_device=_clipped_by_on_device)


def _clipped_by(norm: float, limit: float) -> float:
    """How many times smaller clipping made gradients of this norm; 1 where it left them alone."""
    ratio = (norm + 1e-6) / limit if limit else math.inf
    return ratio if math.isfinite(ratio) and ratio > 1.0 else 1.0


def _clipped_by_on_device(norm: Any, limit: float) -> Any:
    import torch

    ratio = (norm + 1e-6) / limit
    return torch.where(ratio.isfinite() & (ratio > 1.0), ratio, 1.0)


def _better_norm(given: Any, own: Any) -> Any:
    """The loop's norm, except where only its float32 overflowed."""
    return calculate(_finite_one, given, own, on_device=_finite_one_on_device)


def _finite_one(given: float, own: float) -> float:
    return own if not math.isfinite(given) and math.isfinite(own) else given


def _finite_one_on_device(given: Any, own: Any) -> Any:
    if isinstance(given, float):
        return given if math.isfinite(given) else own
    return given if isinstance(own, float) else given.where(given.isfinite() | ~own.isfinite(), own)


def _layer_ratio(first: float, last: float) -> float | None:
    return first / last if last > 0 else None
