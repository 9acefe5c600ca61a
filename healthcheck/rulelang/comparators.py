"""Tests of a score: ``above``, ``below``, ``at_least``, ``at_most``, ``equals``, ``outside``.

A comparator is a plain function with attributes, because it is called for every score of every
rule and a function is the cheapest callable that Python has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, nextafter
from typing import Any, Protocol, cast

from healthcheck.protocols import Comparator
from healthcheck.rulelang.quantities import QuantityError, parse_quantity
from healthcheck.text import as_written

COMPARATORS = ("above", "below", "at_least", "at_most", "equals", "outside")


class Bound(Protocol):
    """A comparator that knows its limits.

    ``low`` and ``high`` are the scores beyond which it is true, or None where that side is open;
    the windows of conditions use them to clip outliers, a device gate to compare without us.
    """

    text: str
    kind: str
    low: float | None
    high: float | None
    direction: int
    """1 if greater scores are nearer to a breach, -1 if smaller ones are, 0 for two sides."""
    healthy: tuple[float, float]
    """Scores from the first to the second do not breach, so that one chained comparison spares the call."""
    exact: bool
    """Whether all others do."""

    def __call__(self, score: float) -> bool: ...


def make_comparator(kind: str, value: Any) -> Bound:
    """Build the comparator ``kind`` for the value written in the file.

    Raises ``QuantityError`` when the value is not a finite number (for ``outside``: two of them).
    """
    if kind == "outside":
        return _outside(value)
    limit = parse_quantity(value)
    words = f"{kind.replace('_', ' ')} {_as_written(value, limit)}"
    if kind == "above":
        return _bound(lambda score: score > limit, words, kind, high=limit)
    if kind == "at_least":
        return _bound(lambda score: score >= limit, words, kind, high=limit)
    if kind == "below":
        return _bound(lambda score: score < limit, words, kind, low=limit)
    if kind == "at_most":
        return _bound(lambda score: score <= limit, words, kind, low=limit)
    if kind == "equals":
        return _bound(lambda score: score == limit, words, kind, healthy=(nextafter(limit, inf), inf))
    raise QuantityError(f'"{kind}" is not a comparator; write one of {", ".join(COMPARATORS)}')


def comparator_in(options: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The one comparator among some options; None if there is none.

    Raises ``QuantityError`` when there are several: one score, one test.
    """
    found = [key for key in COMPARATORS if key in options]
    if len(found) > 1:
        hint = "; write `outside: [low, high]`" if {"above", "below"} <= set(found) else ""
        raise QuantityError(f"one comparator expected, found {len(found)}: {', '.join(found)}{hint}")
    return (found[0], options[found[0]]) if found else None


def count_reached(limit: int, words: str) -> Bound:
    """``score >= limit`` for conditions that count, with words of their own."""
    return _bound(lambda score: score >= limit, words, "at_least", high=float(limit))


def as_bounds(test: Comparator) -> tuple[float, float, Comparator | None]:
    """Bounds of its healthy scores, and the comparator itself where it must be called, because others may be healthy too.

    Comparators of plugins need not have bounds.
    """
    low, high = getattr(test, "healthy", (inf, -inf))
    return low, high, None if getattr(test, "exact", False) else test


def _never(score: float) -> bool:
    return False


def _outside(value: Any) -> Bound:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise QuantityError("`outside` takes two numbers: [low, high]")
    low, high = parse_quantity(value[0]), parse_quantity(value[1])
    if low >= high:
        raise QuantityError(f"`outside: [{as_written(low)}, {as_written(high)}]` needs the smaller number first")
    words = f"outside {_as_written(value[0], low)} to {_as_written(value[1], high)}"
    return _bound(lambda score: score < low or score > high, words, "outside", low=low, high=high)


def _as_written(value: Any, number: float) -> str:
    return value.strip() if isinstance(value, str) else as_written(number)


def _bound(
    test: Callable[[float], bool],
    text: str,
    kind: str,
    *,
    low: float | None = None,
    high: float | None = None,
    healthy: tuple[float, float] | None = None,
) -> Bound:
    bound = cast("Bound", test)
    bound.text, bound.kind, bound.low, bound.high = text, kind, low, high
    inclusive = kind in ("at_least", "at_most")
    bound.exact = healthy is None
    bound.healthy = healthy or (
        -inf if low is None else nextafter(low, inf) if inclusive else low,
        inf if high is None else nextafter(high, -inf) if inclusive else high,
    )
    bound.direction = 0 if kind in ("outside", "equals") else (-1 if high is None else 1)
    return bound


ABSENT = _bound(_never, "absent", "absent")
"""``only_if: {reward: absent}``: a guard without samples holds, and one with samples never does."""
