"""Series whose score needs no call: thresholds, and the test for NaN and infinity.

They differ from :class:`SeriesState` only in how they find that nothing happened; anything else is left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from healthcheck.engine.series import NOTHING, SeriesState
from healthcheck.protocols import Promise, Scorer
from healthcheck.rulelang.conditions.foresight import EVER
from healthcheck.rulelang.rule import Rule
from healthcheck.samples import Labels
from healthcheck.verdicts import State

_OK = State.OK


class ThresholdSeries(SeriesState):
    """A series whose score is its value."""

    __slots__ = ()

    def feed(self, x: float, step: int, now: float) -> int:
        if self.calm_from <= x <= self.calm_to:
            self.n += 1
            self.last_step = step
            self.value = self.score = x
            return NOTHING
        return SeriesState.feed(self, x, step, now)

    def foresee(self, last: float) -> Promise | None:
        return (*self.quiet, EVER) if self.state is _OK else None

    def catch_up(self, values: Sequence[float], steps: Sequence[int]) -> None:
        nearest = max(values) if self.upward else min(values)
        away = nearest if self.upward else -nearest
        if away > self.peak:
            self.peak = away
            self.peak_step = steps[values.index(nearest)]
            self._calm_down()
        self.n += len(values)
        self.last_step = steps[-1]
        self.value = self.score = values[-1]


class FiniteSeries(SeriesState):
    """A series that breaches when it is not finite. Its closest approach is known once it was OK."""

    __slots__ = ()

    def feed(self, x: float, step: int, now: float) -> int:
        if self.state is not _OK or x - x != 0.0:
            return SeriesState.feed(self, x, step, now)
        self.n += 1
        self.last_step = step
        self.value = x
        self.score = 0.0
        return NOTHING

    def foresee(self, last: float) -> Promise | None:
        return (-inf, inf, EVER) if self.state is _OK else None

    def catch_up(self, values: Sequence[float], steps: Sequence[int]) -> None:
        self.n += len(values)
        self.last_step = steps[-1]
        self.value = values[-1]
        self.score = 0.0


def series_for(rule: Rule, labels: Labels, scorer: Scorer, start_step: int, *, excused: bool = False) -> SeriesState:
    """The kind of series that a scorer needs."""
    kind: type[SeriesState] = SeriesState
    if getattr(scorer, "is_identity", False):
        kind = ThresholdSeries
    elif getattr(scorer, "is_finiteness", False):
        kind = FiniteSeries
    return kind(rule, labels, scorer, start_step, excused=excused)
