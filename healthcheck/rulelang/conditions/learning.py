"""Which breaching samples enter a baseline: the rule keys ``outliers`` and ``reseed``.

``include`` learns every sample, ``exclude`` none that breaches, ``clip`` learns a breaching
sample as the value that lies just at the threshold: a burst does not mask itself, and a lasting
new level is still accepted in time. ``reseed: n`` accepts the new level after n breaching samples
in a row: the baseline starts again from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from healthcheck.rulelang.comparators import Bound
from healthcheck.rulelang.conditions.base import OptionError

POLICIES = ("include", "exclude", "clip")


class Learning:
    """The policy of one rule; shared by its series."""

    __slots__ = ("breaches", "high", "low", "outliers", "plain", "reseed")

    def __init__(self, rule: Mapping[str, Any], breaches: Bound, *, default: str, window: int) -> None:
        self.outliers: str = rule.get("outliers") or default
        self.reseed: int = rule.get("reseed") or 0
        self.breaches = breaches
        self.low, self.high = breaches.low, breaches.high
        if self.reseed > window:
            raise OptionError(f"reseed {self.reseed} is more than the window of {window} samples", rule_key="reseed")
        self.plain = self.outliers == "include" and not self.reseed
        """True if nothing has to be decided: every sample is learnt as it is."""

    def admit(
        self, value: float, score: float | None, streak: list[float], value_at: Callable[[float], float]
    ) -> tuple[float | None, list[float] | None]:
        """``(value to learn or None, new content of the baseline or None)``.

        ``streak`` holds the breaching samples in a row and is kept up to date here; ``value_at``
        gives the value whose score would be the one asked for.
        """
        if score is None or not self.breaches(score):
            streak.clear()
            return value, None
        if self.reseed:
            streak.append(value)
            if len(streak) >= self.reseed:
                level = streak[:]
                streak.clear()
                return None, level
        if self.outliers == "include":
            return value, None
        if self.outliers == "exclude":
            return None, None
        limit = self.high if self.high is not None and score >= self.high else self.low
        if limit is None:
            return None, None
        clipped = value_at(limit)
        return (clipped if isfinite(clipped) else None), None
