"""Which parameters are bad, after a hit: facts for messages. Reads values; never on the hot path."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from healthcheck.probes.gradient_statistics import GradientStats
from healthcheck.probes.kernels.foreach import plain_values
from healthcheck.probes.labels import first_few
from healthcheck.probes.transfer.deferred import value_of, values_of

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
