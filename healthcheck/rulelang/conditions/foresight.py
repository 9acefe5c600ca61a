"""What a condition can promise about values that have not come yet (``foresee``, see :class:`~healthcheck.protocols.Scorer`).

One new value moves each order statistic of a window by one place at most, whether an old one leaves for it or
not. That bounds what the median can be after k values, whatever these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

EVER = 1 << 30
"""A promise without an end."""
ROUNDING = 1e-9
"""Promises are narrower by this share, for the sake of rounding errors."""


def narrowed(low: float, high: float) -> tuple[float, float]:
    """Bounds that rounding cannot carry across the limits that they are made of."""
    return (
        low + ROUNDING * abs(low) if low > -inf else low,
        high - ROUNDING * abs(high) if high < inf else high,
    )


def certain(values: Sequence[float], bounds: tuple[float, float] | None) -> int:
    """How many of the values lie within the bounds before one does not."""
    if bounds is None:
        return 0
    low, high = bounds
    if low < min(values) and max(values) < high:
        return len(values)
    return next(at for at, value in enumerate(values) if not low < value < high)


def median_within(ordered: Sequence[float], count: int) -> tuple[float, float] | None:
    """Between which values the median of a window lies for the next ``count`` values; None if that is not known.

    :param ordered: the window, sorted.
    """
    n = len(ordered)
    low, high = ((n - 1) >> 1) - count, (n >> 1) + count
    return (ordered[low], ordered[high]) if low >= 0 else None
