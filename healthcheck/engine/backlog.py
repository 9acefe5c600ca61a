"""Values of one series that its rules have not looked at yet, because there is nothing to see in them.

Nearly every value of a healthy run changes nothing: no rule comes nearer to a breach. A rule often knows that
before the value comes: "the next 16 values do not concern me, as long as they lie between these two"
(:meth:`SeriesState.foresee`). While all that look at a series say so, its values are only kept. They are learnt
together as soon as one lies outside, as the promise ends, or as somebody wants to know how things stand; so the
rules come to the same verdicts at the same steps as if each value had been shown to each of them.

What makes the difference is the interpreter: a value that is kept costs a comparison and an append, a value
that is judged several calls for each rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

from healthcheck.engine.combined import Side
from healthcheck.engine.judges import Judge
from healthcheck.engine.series import SeriesState
from healthcheck.samples import Sample

if TYPE_CHECKING:
    from healthcheck.engine.routes import Plan

MOST = 256
"""Values that are kept at most."""
LEAST = 4
"""A promise for fewer values is not worth its price."""
PAUSE = 8
"""Values that all look at after none of them could promise anything; twice as many each time, up to ``LONGEST``."""
LONGEST = 128
RESTLESS = 64
"""For so many values nothing is asked of a rule whose promise did not last."""


class Backlog:
    """One series: who looks at its values, and the values that nobody needs to look at yet.

    :param judges: the rules that look at every value, in file order.
    :param sides: parts of rules on other metrics that look at this series, too.
    """

    __slots__ = (
        "_all", "_count", "_pause", "_plan", "_restless", "_sides", "_spared", "_vain", "high", "low", "prompt", "room", "steps",
        "values",
    )  # fmt: skip

    def __init__(self, judges: Iterable[Judge], sides: Iterable[Side]) -> None:
        self._all = tuple(judges)
        self._sides = tuple(sides)
        self._plan: Plan | None = None
        """Which plan has written down the bounds."""
        self._spared: list[tuple[SeriesState, float, float]] = []
        """Who does not look at the values that are kept, and from where to where."""
        self._restless: dict[SeriesState, int] = {}
        """Who is not asked until so many values have come."""
        self._count = 0
        """Values that have come before those that are kept."""
        self.prompt: tuple[Judge, ...] = self._all
        """Who looks at a value although it is kept."""
        self.low = self.high = inf
        """A value strictly between these is kept."""
        self.room = 0
        """How many values may be kept."""
        self.values: list[float] = []
        self.steps: list[int] = []
        self._pause = self._vain = PAUSE
        for _, series, _ in self._all:
            if series is not None:
                series.backlog = self
        for side in self._sides:
            for other in side.backlogs:
                other.settle()
            side.backlogs.append(self)

    @property
    def open(self) -> bool:
        """Whether values are kept now."""
        return self.low < inf and len(self.values) < self.room

    def take(self, sample: Sample) -> tuple[Judge, ...]:
        """Take the next value: who has to look at it."""
        value = sample.value
        if self.low < value < self.high and len(self.values) < self.room:
            return self.keep(value, sample.step)
        if self.low < inf:
            self._leave(value)
        if self._pause:
            self._pause -= 1
        else:
            self._ask(value)
            if self.low < value < self.high:
                return self.keep(value, sample.step)
        return self.show(sample)

    def keep(self, value: float, step: int) -> tuple[Judge, ...]:
        """Take a value that lies within the bounds."""
        self.values.append(value)
        self.steps.append(step)
        return self.prompt

    def show(self, sample: Sample) -> tuple[Judge, ...]:
        """Let everybody look at a value."""
        self._count += 1
        for side in self._sides:
            side.feed(sample.value, sample.step)
        return self._all

    def settle(self) -> None:
        """Learn what was kept, and ask all rules again before anything more is."""
        if self.values:
            values, steps = self.values[:], self.steps[:]
            self.values.clear()
            self.steps.clear()
            self._count += len(values)
            for side in self._sides:
                side.catch_up(values, steps)
            for series, _, _ in self._spared:
                series.catch_up(values, steps)
        if self.low < inf:
            self._pause = 0
            self._set(inf, inf, 0)

    def _set(self, low: float, high: float, room: int) -> None:
        self.low, self.high, self.room = low, high, room
        if self._plan is not None:
            self._plan.stale = True

    def list_in(self, plan: Plan) -> None:
        """The plan writes down the bounds; whichever did before has to ask again."""
        if self._plan is not plan:
            if self._plan is not None:
                self._plan.stale = True
            self._plan = plan

    def _leave(self, value: float) -> None:
        """The promises are at an end: their time is over, or a value has come that they do not cover."""
        kept = len(self.values)
        if kept < min(self.room, PAUSE):
            for series, low, high in self._spared:
                if not low < value < high:
                    self._restless[series] = self._count + kept + RESTLESS
        self.settle()

    def _ask(self, value: float) -> None:
        """Who needs not look at the next values, if they are like this one."""
        low, high, room = -inf, inf, MOST
        prompt: list[Judge] = []
        self._spared = []
        if not any(len(side.backlogs) > 1 for side in self._sides):  # which of its series spoke last must not get lost
            for judge in self._all:
                state, series, _ = judge
                spared = series is not None and not (state.shut or state.attended)
                if series is not None and spared and self._restless.get(series, 0) <= self._count:
                    promise = series.foresee(value)
                    if promise is not None and promise[0] < value < promise[1] and promise[2] >= LEAST:
                        low, high, room = max(low, promise[0]), min(high, promise[1]), min(room, promise[2])
                        self._spared.append((series, promise[0], promise[1]))
                        continue
                prompt.append(judge)
            if self._spared or self._sides:
                self._set(low, high, room)
                self.prompt = tuple(prompt)
                self._vain = PAUSE
                return
        self._pause = self._vain
        self._vain = min(2 * self._vain, LONGEST)

    def leave(self) -> None:
        """Learn what was kept; there will be another backlog for this series."""
        self.settle()
        for side in self._sides:
            side.backlogs.remove(self)


class Twice(Backlog):
    """Stands for a backlog where its series comes twice in one evaluation: all must look at both."""

    __slots__ = ("_backlog",)

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._plan = None
        self.low = self.high = inf
        self.values = []
        self.room = 0

    def take(self, sample: Sample) -> tuple[Judge, ...]:
        self._backlog.settle()
        return self._backlog.show(sample)
