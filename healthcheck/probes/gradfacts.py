"""What messages say of gradients: which parameters, how many values, of the step that was bad."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from healthcheck.probes.gradstats import GradientStats
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
        numbers = self._stats.table.numbers()
        return zero_facts([numbers[self._stats.position("all_zero", k)] for k in range(len(self._names))], self._names)


def facts_of_norms(norms: Any, names: list[str]) -> Callable[[], dict[str, Any]]:
    """Facts read from the norms when an alert asks: the bad ones, else the largest."""

    def facts() -> dict[str, Any]:
        values = norms.tolist()
        bad = [name for name, value in zip(names, values, strict=True) if not math.isfinite(value)]
        if bad:
            return {"first": bad[0], "tensors": f"{len(bad):,} of {len(names):,} gradients not finite"}
        largest = max(range(len(values)), key=values.__getitem__)
        return {"largest": f"{names[largest]}, norm {values[largest]:.3g}"}

    return facts


def zero_facts(zero: Sequence[Any], names: list[str]) -> dict[str, Any]:
    hit = [name for name, flag in zip(names, zero, strict=True) if flag]
    return {"which": first_few(hit), "tensors": f"{len(hit):,} of {len(names):,} gradients exactly zero"}
