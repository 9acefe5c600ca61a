"""Series whose score needs no call: thresholds, and the test for NaN and infinity.

They differ from :class:`SeriesState` only in that they know values for which the engine need not ask them.
"""

from __future__ import annotations

from sys import float_info

from healthcheck.engine.series import NOTHING_IS_CALM, SeriesState
from healthcheck.protocols import Scorer
from healthcheck.rulelang.rule import Rule
from healthcheck.samples import Labels
from healthcheck.verdicts import State


class ThresholdSeries(SeriesState):
    """A series whose score is its value."""

    __slots__ = ()

    @property
    def score(self) -> float | None:
        value = self.value
        return value if value - value == 0.0 else None

    @score.setter
    def score(self, score: float | None) -> None:
        """It goes with the value."""

    def calm_down(self) -> None:
        super().calm_down()
        # Infinity breaches every numeric rule, whatever the comparator says.
        self.idle_from, self.idle_to = max(self.calm_from, -float_info.max), min(self.calm_to, float_info.max)


class FiniteSeries(SeriesState):
    """A series that breaches when it is not finite. Its closest approach is known once it was OK."""

    __slots__ = ()

    def calm_down(self) -> None:
        super().calm_down()
        ok = self.state is State.OK
        self.idle_from, self.idle_to = (-float_info.max, float_info.max) if ok else NOTHING_IS_CALM


def series_for(rule: Rule, labels: Labels, scorer: Scorer, start_step: int, *, excused: bool = False) -> SeriesState:
    """The kind of series that a scorer needs."""
    kind: type[SeriesState] = SeriesState
    if getattr(scorer, "is_identity", False):
        kind = ThresholdSeries
    elif getattr(scorer, "is_finiteness", False):
        kind = FiniteSeries
    return kind(rule, labels, scorer, start_step, excused=excused)
