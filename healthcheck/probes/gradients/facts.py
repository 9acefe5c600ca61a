"""What messages say of gradients: which parameters, how many values, of the step that was bad."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from healthcheck.probes.gradients.statistics import GradientStats
from healthcheck.probes.names import first_few


class GradientFacts:
    """Facts for a message, from the statistics that came with the value: of its step, not of a later one."""

    __slots__ = ("_stats", "all_names", "tables")

    def __init__(self, stats: GradientStats, names: list[str]) -> None:
        self._stats = stats
        self.all_names = names
        """Of all parameters, also of those without a gradient."""
        self.tables = (stats.table,)
        """Shipped by the mailbox with the letter."""

    @property
    def names(self) -> list[str]:
        return [self.all_names[i] for i in self._stats.indices]

    def __call__(self) -> dict[str, Any]:
        stats, names = self._stats, self.names
        assert stats.table is not None
        numbers = stats.table.numbers()
        norms = [numbers[stats.position("norm", k)] for k in range(len(names))]
        bad = [k for k, norm in enumerate(norms) if not math.isfinite(norm)]
        if bad:
            first = names[bad[0]]
            if stats.has("nonfinite"):
                count = numbers[stats.position("nonfinite", bad[0])]
                first += f", {count:,.0f} of {stats.lengths[bad[0]]:,} values"
            return {"first": first, "tensors": f"{len(bad):,} of {len(names):,} gradients not finite"}
        largest = max(range(len(norms)), key=norms.__getitem__)
        return {"largest": f"{names[largest]}, norm {norms[largest]:.3g}"}


class ZeroFacts:
    """Which gradients were exactly zero, from the statistics of that step."""

    __slots__ = ("_names", "_stats", "tables")

    def __init__(self, stats: GradientStats, names: list[str]) -> None:
        self._stats = stats
        self._names = names
        self.tables = (stats.table,)

    def __call__(self) -> dict[str, Any]:
        assert self._stats.table is not None
        return zero_facts(self._flags(self._stats.table.numbers()), self._names)

    def count(self, numbers: Sequence[float]) -> float:
        """How many there were, from the numbers of the table."""
        return float(sum(self._flags(numbers)))

    def _flags(self, numbers: Sequence[float]) -> list[bool]:
        zero = [numbers[self._stats.position("all_zero", k)] != 0 for k in range(len(self._names))]
        return [flag and zero[k] for flag, k in zip(zero, silent_together(self._names), strict=True)]


def silent_together(names: Sequence[str]) -> list[int]:
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


def facts_of_norms(norms: Any, all_names: Sequence[str], indices: Sequence[int]) -> Callable[[], dict[str, Any]]:
    """Facts read from the norms when an alert asks: the bad ones, else the largest.

    :param indices: which of ``all_names`` they belong to.
    """

    def facts() -> dict[str, Any]:
        values, names = norms.tolist(), [all_names[i] for i in indices]
        bad = [name for name, value in zip(names, values, strict=True) if not math.isfinite(value)]
        if bad:
            return {"first": bad[0], "tensors": f"{len(bad):,} of {len(names):,} gradients not finite"}
        largest = max(range(len(values)), key=values.__getitem__)
        return {"largest": f"{names[largest]}, norm {values[largest]:.3g}"}

    return facts


def zero_facts(zero: Sequence[Any], names: list[str]) -> dict[str, Any]:
    hit = [name for name, flag in zip(names, zero, strict=True) if flag]
    return {"which": first_few(hit), "tensors": f"{len(hit):,} of {len(names):,} gradients exactly zero"}
