"""Which breaching samples enter a baseline: the rule keys ``outliers`` and ``reseed``.

``include`` learns every sample, ``exclude`` none that breaches, ``clip`` learns a breaching
sample as the value that lies just at the threshold: a burst does not mask itself, and a lasting
new level is still accepted in time. ``reseed: n`` accepts the new level after n breaching samples
in a row: the baseline starts again from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from healthcheck.core.protocols import Bound, Comparator
from healthcheck.rulelang.conditions.base import OptionError

POLICIES = ("include", "exclude", "clip")


class Learning:
    """The policy of one rule; shared by its series.

    :param rule: the keys of the rule that a compiler of conditions is given.
    :param default: what ``outliers`` is where the rule does not say.
    :param window: samples that the baseline holds at most.

    Raises ``OptionError`` when ``reseed`` asks for more samples than the window holds.
    """

    __slots__ = ("breaches", "outliers", "plain", "reseed")

    def __init__(self, rule: Mapping[str, Any], breaches: Comparator, *, default: str = "include", window: int) -> None:
        self.outliers: str = rule.get("outliers") or default
        self.reseed: int = rule.get("reseed") or 0
        self.breaches = breaches
        if self.reseed > window:
            raise OptionError(f"reseed {self.reseed} is more than the window of {window} samples", rule_key="reseed")
        self.plain = self.outliers == "include" and not self.reseed
        """True if nothing has to be decided: every sample is learnt as it is."""

    def admit(
        self,
        value: float,
        score: float | None,
        streak: list[float],
        bound: Callable[[Bound], Bound | None],
    ) -> tuple[Sequence[float], bool]:
        """What to learn of a sample that was scored: ``(values, afresh)``.

        :param streak: the breaching samples in a row, kept up to date here; part of the scorer's saved state.
        :param bound: the scorer's own ``bound``: where its threshold lies now.

        ``afresh`` says that the baseline starts again from the values.
        """
        if score is None or not self.breaches(score):
            streak.clear()
            return (value,), False
        if self.reseed:
            # Kept whatever is learnt meanwhile: once the streak is long enough it is the new level.
            streak.append(value)
            if len(streak) >= self.reseed:
                level = streak[:]
                streak.clear()
                return level, True
        if self.outliers == "include":
            return (value,), False
        # Without an exact interval of healthy scores (`equals`) there is no threshold to clip to.
        if self.outliers == "clip" and self.breaches.exact:
            fine = bound(self.breaches.healthy)
            if fine is not None:
                nearest = fine.high if score > self.breaches.healthy.high else fine.low
                return ((nearest,) if isfinite(nearest) else ()), False
        return (), False
