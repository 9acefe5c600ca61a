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
from operator import attrgetter
from typing import TYPE_CHECKING

from healthcheck.engine.combined import Side
from healthcheck.engine.demand import NEVER
from healthcheck.engine.judges import Judge
from healthcheck.samples import Sample

if TYPE_CHECKING:
    from healthcheck.engine.routes import Plan

MOST = 1024
"""Values that are kept at most."""
LEAST = 4
"""A promise for fewer values is not worth its price."""
PAUSE = 8
"""Values until a rule that promised nothing is asked again; twice as many each time, up to ``LONGEST``."""
LONGEST = 128
RESTLESS = 32
"""Values until a rule is asked again whose promise was broken at once."""


_place = attrgetter("place")


class Member:
    """One rule at one series: it looks at every value, or is spared some."""

    __slots__ = ("ask_at", "high", "judge", "low", "place", "seen", "series", "state", "until", "vain")

    def __init__(self, place: int, judge: Judge) -> None:
        self.place = place
        """In file order."""
        self.judge = judge
        self.state, self.series, _ = judge
        self.low, self.high, self.until = inf, inf, 0
        """Its promise: bounds, and how many values may be kept by then."""
        self.seen = 0
        """How many of the kept values it has learnt."""
        self.ask_at, self.vain = PAUSE, PAUSE
        """How many values must have come before it is asked, and how long to wait if that is in vain."""

    def promise(self, value: float, count: int, kept: int) -> bool:
        """Ask it: whether the next values are spared it, this one included."""
        series = self.series
        if series is not None and not (self.state.shut or self.state.attended):
            promise = series.foresee(value)
            if promise is not None and promise[0] < value < promise[1] and promise[2] >= LEAST:
                self.low, self.high, room = promise
                self.until, self.seen, self.vain = kept + room, kept, PAUSE
                return True
        self.ask_at = count + self.vain
        self.vain = min(2 * self.vain, LONGEST)
        return False


class Backlog:
    """One series: who looks at its values, and the values that somebody has not looked at yet.

    :param judges: the rules that look at every value, in file order.
    :param sides: parts of rules on other metrics that look at this series, too.
    """

    __slots__ = (
        "_awake", "_before", "_plan", "_sides", "_spared", "high", "low", "prompt", "room", "steps", "values",
    )  # fmt: skip

    def __init__(self, judges: Iterable[Judge], sides: Iterable[Side]) -> None:
        self._awake = [Member(place, judge) for place, judge in enumerate(judges)]
        self._spared: list[Member] = []
        self._sides = tuple(sides)
        self._plan: Plan | None = None
        """Which plan has written down the bounds."""
        self._before = 0
        """Values that came before those that are kept."""
        self.prompt = tuple(member.judge for member in self._awake)
        """Who looks at a value although it is kept."""
        self.low = self.high = inf
        """A value strictly between these is kept without a question."""
        self.room = 0
        """How many values may be kept."""
        self.values: list[float] = []
        self.steps: list[int] = []
        for member in self._awake:
            if member.series is not None:
                member.series.backlog = self
        for side in self._sides:
            side.backlogs.append(self)
            if len(side.backlogs) > 1:  # which of its series spoke last must not get lost
                for backlog in side.backlogs:
                    backlog.wake()

    @property
    def open(self) -> bool:
        """Whether values are kept."""
        return self.low < inf

    def take(self, sample: Sample) -> tuple[Judge, ...]:
        """Take the next value: who has to look at it."""
        value, kept = sample.value, len(self.values)
        if self.low < value < self.high and kept < self.room:
            return self.keep(value, sample.step)
        if kept >= MOST:
            self.settle()
            kept = 0
        count = self._before + kept
        self._rouse(value, count, kept)
        if self._keeps():
            ready = [m for m in self._awake if m.ask_at <= count and m.promise(value, count, kept)]
            if ready:
                self._awake = [m for m in self._awake if m not in ready]
                self._spared += ready
            if self._spared or self._sides:
                self._set_bounds(count, kept)
                return self.keep(value, sample.step)
        if self.low < inf:
            self.settle()
            self._close()
        return self._show(sample)

    def keep(self, value: float, step: int) -> tuple[Judge, ...]:
        """Keep a value."""
        self.values.append(value)
        self.steps.append(step)
        return self.prompt

    def _rouse(self, value: float, count: int, kept: int) -> None:
        """Whose promise does not cover this value looks at it."""
        for member in self._spared[:]:
            broken = not member.low < value < member.high
            if broken or member.until <= kept:
                self._wake(member)
                short = broken and kept - member.seen < LEAST
                member.ask_at = count + (RESTLESS if short else broken)

    def _wake(self, member: Member) -> None:
        if member.series is not None and member.seen < len(self.values):
            member.series.catch_up(self.values[member.seen :], self.steps[member.seen :])
        self._spared.remove(member)
        self._awake.append(member)

    def _keeps(self) -> bool:
        return all(len(side.backlogs) == 1 for side in self._sides)

    def _set_bounds(self, count: int, kept: int) -> None:
        spared = self._spared
        self.low = max([m.low for m in spared], default=-inf)
        self.high = min([m.high for m in spared], default=inf)
        asked = min([m.ask_at for m in self._awake], default=NEVER) - count + kept
        self.room = min([MOST, asked, *[m.until for m in spared]])
        self._tell()

    def _close(self) -> None:
        self.low, self.room = inf, 0
        self._tell()

    def _tell(self) -> None:
        self._awake.sort(key=_place)
        self.prompt = tuple([member.judge for member in self._awake])
        self._changed()

    def _changed(self) -> None:
        if self._plan is not None:
            self._plan.stale = True

    def list_in(self, plan: Plan) -> None:
        """The plan writes down the bounds; whichever did before has to ask again."""
        if self._plan is not plan:
            self._changed()
            self._plan = plan

    def settle(self) -> None:
        """Let everybody learn what was kept."""
        kept = len(self.values)
        if not kept:
            return
        values, steps = self.values[:], self.steps[:]
        self.values.clear()
        self.steps.clear()
        self._before += kept
        for side in self._sides:
            side.catch_up(values, steps)
        for member in self._spared:
            if member.series is not None and member.seen < kept:
                member.series.catch_up(values[member.seen :], steps[member.seen :])
            member.seen = 0
            member.until -= kept
        self.room -= kept

    def wake(self) -> None:
        """Let everybody learn what was kept, and look at the next value."""
        self.settle()
        self._awake += self._spared
        self._spared = []
        for member in self._awake:
            member.ask_at = self._before
        if self.low < inf:
            self._close()

    def show(self, sample: Sample) -> tuple[Judge, ...]:
        """Let everybody look at a value."""
        self.wake()
        return self._show(sample)

    def _show(self, sample: Sample) -> tuple[Judge, ...]:
        self._before += 1
        for side in self._sides:
            side.feed(sample.value, sample.step)
        return self.prompt

    def leave(self) -> None:
        """Learn what was kept; there will be another backlog for this series."""
        self.wake()
        for side in self._sides:
            side.backlogs.remove(self)


class Twice(Backlog):
    """Stands for a backlog where its series comes twice in one evaluation: all must look at both."""

    __slots__ = ("_backlog",)

    def __init__(self, backlog: Backlog) -> None:
        self._backlog = backlog
        self._plan = None
        self.low = self.high = inf

    def take(self, sample: Sample) -> tuple[Judge, ...]:
        return self._backlog.show(sample)
