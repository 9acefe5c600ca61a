"""Tests of a score: ``above``, ``below``, ``at_least``, ``at_most``, ``equals``, ``outside``.

A comparator publishes the scores that are healthy as an interval, so that it is only called for the others.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping
from functools import cmp_to_key
from math import inf, nextafter
from typing import Any

from healthcheck.core.protocols import EMPTY, Bound, Comparator
from healthcheck.core.text import as_written
from healthcheck.rulelang.quantities import QuantityError, parse_quantity

COMPARATORS = ("above", "below", "at_least", "at_most", "equals", "outside")
EVERYTHING = Bound(-inf, inf)
_HALF = 1 << 63
_LARGEST = sys.float_info.max


class Threshold:
    """A comparator with a limit, or two for ``outside``; see :class:`healthcheck.core.protocols.Comparator`.

    :param kind: one of :data:`COMPARATORS`.
    :param limit: a number, or a quantity as in rule files (``"5%"``); ``[low, high]`` for ``outside``.
    :param text: the words of alerts and reports; ``above 8`` and the like where none are given.

    Raises ``QuantityError`` (a ``ValueError``) when the limit is not a finite number (for ``outside``: two of them).
    """

    __slots__ = ("direction", "exact", "healthy", "high", "kind", "low", "text")

    def __init__(self, kind: str, limit: Any, text: str = "") -> None:
        if kind not in COMPARATORS:
            raise QuantityError(f'"{kind}" is not a comparator; write one of {", ".join(COMPARATORS)}')
        self.kind = kind
        self.low: float | None = None
        """The limit below which scores breach, or the one that they must not equal; None if there is none."""
        self.high: float | None = None
        """The same above."""
        self.exact = kind != "equals"  # scores on both sides of it are healthy, and one interval cannot hold both
        if kind == "outside":
            self.low, self.high, words = _two_limits(limit)
            self.direction = 0
            self.healthy = Bound(self.low, self.high)
        else:
            number = parse_quantity(limit)
            words = f"{kind.replace('_', ' ')} {_as_written(limit, number)}"
            if kind in ("above", "at_least"):
                self.high, self.direction = number, 1
                self.healthy = Bound(-inf, number if kind == "above" else nextafter(number, -inf))
            elif kind in ("below", "at_most"):
                self.low, self.direction = number, -1
                self.healthy = Bound(number if kind == "below" else nextafter(number, inf), inf)
            else:
                self.low = self.high = number
                self.direction = 0
                self.healthy = Bound(nextafter(number, inf), inf)  # the scores below it are healthy as well
        self.text = text or words

    def __repr__(self) -> str:
        return f"<{self.text}>"

    def __call__(self, score: float) -> bool:
        if self.exact:
            low, high = self.healthy.low, self.healthy.high
            return score < low or score > high
        return score == self.high

    def closer(self, score: float, than: float) -> bool:
        if self.direction:
            return score > than if self.direction > 0 else score < than
        return self._away(score) < self._away(than)

    def quiet(self, closest: float) -> Bound:
        low, high = self.healthy.low, self.healthy.high
        if self.direction > 0:
            return Bound(low, closest if closest < high else high)
        if self.direction < 0:
            return Bound(closest if closest > low else low, high)
        away = self._away(closest)
        if away <= 0.0:
            return self.healthy
        if not self.exact:
            return Bound(closest, inf) if closest >= low else Bound(-inf, closest)
        # One float narrower on either side: a difference that was rounded must not let a closer score pass.
        return Bound(nextafter(low + away, inf), nextafter(high - away, -inf))

    def _away(self, score: float) -> float:
        """How far a score is from a breach; less than 0 beyond the limits of ``outside``."""
        if self.low is None or self.high is None:
            raise AssertionError("only for two limits")
        if self.exact:
            return min(score - self.low, self.high - score)
        return abs(score - self.high)


class Never:
    """A comparator that nothing breaches."""

    direction = 0
    healthy = EVERYTHING
    exact = True

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, score: float) -> bool:
        return False

    def closer(self, score: float, than: float) -> bool:
        return False

    def quiet(self, closest: float) -> Bound:
        return EVERYTHING


ABSENT = Never("absent")
"""``only_if: {reward: absent}``: a guard without samples holds, and one with samples never does."""


def comparator_in(options: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The one comparator among some options; None if there is none.

    Raises ``QuantityError`` when there are several: one score, one test.
    """
    found = [key for key in COMPARATORS if key in options]
    if len(found) > 1:
        hint = "; write `outside: [low, high]`" if {"above", "below"} <= set(found) else ""
        raise QuantityError(f"one comparator expected, found {len(found)}: {', '.join(found)}{hint}")
    return (found[0], options[found[0]]) if found else None


def closeness(breaches: Comparator) -> Callable[[float], Any]:
    """A key that sorts scores by how close they are to a breach, the closest last."""
    return cmp_to_key(lambda one, other: breaches.closer(one, other) - breaches.closer(other, one))


def exact_bound(score: Callable[[float], float], healthy: Bound, low: float, high: float) -> Bound:
    """The values whose scores lie within ``healthy``, to the last bit.

    Solving ``score(value) = limit`` for the value is right but for rounding, and a comparison of the value with the
    limit must not differ from one of its score. So the solution is only where the search begins.

    :param score: the score of a value; it must not fall where the value rises.
    :param low: about the value with the score ``healthy.low``; ``-inf`` if there is none. ``high`` likewise.
    """
    if healthy.low > healthy.high:
        return EMPTY
    least, most = healthy.low, healthy.high
    return Bound(
        -inf if least == -inf else -_last_fine(lambda value: score(-value) >= least, -low),
        inf if most == inf else _last_fine(lambda value: score(value) <= most, high),
    )


def _last_fine(fine: Callable[[float], bool], guess: float) -> float:
    """The greatest float that is ``fine``, where all smaller ones are; ``-inf`` if none is.

    Floats are counted through by their bits, where neighbours differ by one: the search takes twice as many looks as
    the guess is wrong by bits.
    """
    # Beyond the largest float lies infinity, which breaches by itself.
    end, at = _place(_LARGEST), _place(max(-_LARGEST, min(_LARGEST, guess)))
    stride = 1
    if fine(_float_at(at)):
        good = at
        while True:
            if good == end:
                return inf
            bad = min(good + stride, end)
            if not fine(_float_at(bad)):
                break
            good, stride = bad, 2 * stride
    else:
        bad = at
        while True:
            if bad == -end:
                return -inf
            good = max(bad - stride, -end)
            if fine(_float_at(good)):
                break
            bad, stride = good, 2 * stride
    while bad - good > 1:
        middle = (good + bad) // 2
        if fine(_float_at(middle)):
            good = middle
        else:
            bad = middle
    return _float_at(good)


def _place(number: float) -> int:
    """The place of a float among all floats; that of zero is 0."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits if bits >= 0 else -_HALF - bits


def _float_at(place: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", place if place >= 0 else -_HALF - place))[0]
    return number


def _two_limits(written: Any) -> tuple[float, float, str]:
    if not isinstance(written, (list, tuple)) or len(written) != 2:
        raise QuantityError("`outside` takes two numbers: [low, high]")
    low, high = parse_quantity(written[0]), parse_quantity(written[1])
    if low >= high:
        raise QuantityError(f"`outside: [{as_written(low)}, {as_written(high)}]` needs the smaller number first")
    return low, high, f"outside {_as_written(written[0], low)} to {_as_written(written[1], high)}"


def _as_written(value: Any, number: float) -> str:
    return value.strip() if isinstance(value, str) else as_written(number)
