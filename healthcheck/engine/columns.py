"""The samples of a block, series by series: a run of values for each, so that whoever judges it stays warm; and the last
values of every series, for evidence, for charts and for people who ask.

What is done with samples depends on the series that come together, their *shape*; it is worked out once and used
again while the same ones come.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, NamedTuple

from healthcheck.core.alerts import Alert, Finding
from healthcheck.core.samples import Labels, Row, Sample, Series, series_name
from healthcheck.core.text import number, plural

if TYPE_CHECKING:
    from healthcheck.core.protocols import Comparator
    from healthcheck.engine.rulestate import CauseState, Side
    from healthcheck.engine.series import SeriesState
    from healthcheck.rulelang.accepted import Accepted

SERIES: Callable[[Sample], Series] = attrgetter("metric", "labels", "phase")
"""The series of a sample."""
_VALUE, _VALUES, _STEP, _SAMPLES = attrgetter("value"), attrgetter("values"), attrgetter("step"), itemgetter(1)
DERIVED = 2**32
"""From here on count the places of samples that formulas make: behind those that were handed in."""
_MOST_SHAPES = 100_000
"""Series in all shapes together: runs whose samples come in ever new shapes must not fill the memory."""


class Moment(NamedTuple):
    """One evaluation: what is judged together, by one clock."""

    step: int
    """The step during which this happens; samples may belong to another one."""
    samples: Sequence[Sample]
    """Numbers on the host, any order, all of one step (see :func:`step_by_step`)."""
    now: float
    """Seconds of active training (see rule-language 4.5), non-decreasing."""
    silent: float | None = None
    """A look at rules on silence: for so many seconds nothing has happened; ``samples`` is then empty."""


def step_by_step(samples: Sequence[Sample]) -> Sequence[Sequence[Sample]]:
    """Values of several steps may arrive at once; a guard or a formula must see those of its own step.

    Live runs and replays of their records cut an evaluation up in this way, so that both judge alike.
    """
    if type(samples) is Row:
        return (samples,)
    begin, step, parts = 0, samples[0].step if samples else 0, []
    for index, sample in enumerate(samples):
        if sample.step != step:
            parts.append(samples[begin:index])
            begin, step = index, sample.step
    parts.append(samples[begin:] if begin else samples)
    return parts


class Question:
    """What several rules ask of one metric with the same words in ``only_if``."""

    __slots__ = ("answer", "states", "test", "words")

    def __init__(self, test: Comparator, states: list[CauseState]) -> None:
        self.words = test.text
        self.test = test
        self.states = states
        self.answer: bool | None = None
        """The last one; None before the first sample, which counts as satisfied."""


class Looked:
    """A plain metric that guards ask for or formulas look at."""

    __slots__ = ("columns", "is_input", "level", "metric", "questions")

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.questions: list[Question] = []
        self.is_input = False
        """Whether some formula looks at it."""
        self.level = 0
        """How many formulas stand one upon the other below it; 0 for what is measured."""
        self.columns: list[Column] = []
        """Its samples in the block at hand; several where it comes in several phases."""


class Watch(NamedTuple):
    """What hangs on one series."""

    looked: Looked | None
    sides: tuple[tuple[CauseState, Side], ...]
    """Parts of rules on other metrics."""


Judge = tuple["CauseState", "SeriesState | None"]
"""A rule and its state of one series; None while its guards have not held yet."""


class Column:
    """One series: who wants its samples, and those of the block at hand."""

    __slots__ = (
        "absent", "always", "at", "due", "order", "origins", "paused", "phases", "place", "series", "steps", "values",
        "watch",
    )  # fmt: skip

    def __init__(
        self, series: Series, watch: Watch | None, always: list[Judge], paused: list[Judge], absent: list[CauseState]
    ) -> None:
        self.series = series
        self.watch = watch
        """What is looked up in it, before anything is judged."""
        self.always = always
        """Rules that judge every sample, in file order."""
        self.paused = paused
        """Rules with ``every``."""
        self.absent = absent
        """Rules that watch its absence."""
        self.due = 0
        """The first step at which one of ``paused`` may have its turn."""
        self.phases: list[Column] = [self]
        """The columns of this metric and labels in all phases: rules on any phase judge them as one series."""
        self.origins: Sequence[tuple[Column, int]] = ()
        """Of a column that was put together from several, where each value comes from."""
        self.place = 0
        """Where among the samples of a moment one of them was when they were last sorted; mostly it is there again."""
        self.order = -1
        """Of a derived metric, its place among the formulas."""
        self.values: Sequence[float] = ()
        self.steps: Sequence[int] = ()
        self.at: Sequence[int] = ()
        """The moments of the values, by their place in the block; empty: it has none in this block."""

    def sample(self, moments: Sequence[Moment], place: int) -> tuple[int, Sample]:
        """A sample of this block, by its place in the column; with its place among those of its moment."""
        if self.origins:
            column, place = self.origins[place]
            return column.sample(moments, place)
        at = self.at[place]
        step, samples, now, _ = moments[at]
        metric, labels, phase = self.series
        if self.order >= 0:
            return DERIVED + self.order, Sample(metric, self.steps[place], self.values[place], labels, phase, now)
        alone = (not place or self.at[place - 1] != at) and (place + 1 == len(self.at) or self.at[place + 1] != at)
        if alone and self.place < len(samples) and SERIES(samples[self.place]) == self.series:
            return self.place, samples[self.place]
        nth = place - bisect_left(self.at, at)  # one moment may have several of a series
        for index, sample in enumerate(samples):
            if SERIES(sample) == self.series:
                if not nth:
                    return index, sample
                nth -= 1
        raise LookupError(f"no sample of {metric} at step {step}")  # pragma: no cover - it has been judged


class Shape:
    """The columns of samples that come together, in their order."""

    __slots__ = ("columns", "plain", "rest", "series", "twice")

    def __init__(self, series: tuple[Series, ...], columns: list[Column]) -> None:
        self.series = series
        self.columns = columns
        for place, column in enumerate(columns):
            column.place = place
        self.twice = len(set(series)) < len(series)
        """Whether one series comes more than once."""
        placed = list(enumerate(columns))
        self.plain = [(i, column) for i, column in placed if not (column.watch or column.paused or column.absent)]
        """Columns, with their places, of which a single sample may be judged without being sorted into its column."""
        self.rest = [(i, column) for i, column in placed if column.watch or column.paused or column.absent]


class Shapes:
    """Sorts samples into columns.

    A shape is costly to build and to hash. The last one for each number of samples is kept at hand: mostly it fits,
    and to compare is cheaper.

    :param make: makes the column of a series that was not seen before.
    """

    def __init__(self, make: Callable[[Series], Column]) -> None:
        self._make = make
        self._columns: dict[Series, Column] = {}
        self._shapes: dict[tuple[Series, ...], Shape] = {}
        self._latest: dict[int, Shape] = {}
        self._known = 0
        self.plain: Sequence[tuple[int, Column]] = ()
        """Of a block of one evaluation: the columns that were left empty, with the places of their samples."""
        self._alike: dict[tuple[str, Labels], list[Column]] = {}
        self.several_phases = False
        """Whether some metric has come in several phases."""

    def column(self, series: Series) -> Column:
        """The column of one series."""
        found = self._columns.get(series)
        if found is None:
            found = self._columns[series] = self._make(series)
            found.phases = self._alike.setdefault(series[:2], [])
            found.phases.append(found)
            self.several_phases = self.several_phases or len(found.phases) > 1
        return found

    def _shape(self, series: tuple[Series, ...]) -> Shape:
        shape = self._shapes.get(series)
        if shape is None:
            # Whoever logs other metrics at each step would fill the memory with shapes that are used once.
            self._known += len(series)
            if self._known > _MOST_SHAPES:
                self._shapes.clear()
                self._latest.clear()
                self._known = len(series)
            known = self._columns
            shape = self._shapes[series] = Shape(series, [known.get(one) or self.column(one) for one in series])
        self._latest[len(series)] = shape
        return shape

    def first_new(self, moments: Sequence[Moment], wanted: Callable[[str, Labels], bool]) -> int:
        """The place of the first moment with a series that was not seen before and is ``wanted``; -1 if there is none."""
        columns, latest = self._columns, self._latest
        for place, moment in enumerate(moments):
            given = moment[1]
            shape = latest.get(len(given))
            if type(given) is Row:
                if shape is not None and shape.series is given.series:
                    continue
                its: Iterable[Series] = given.series
            elif shape is not None and tuple(map(SERIES, given)) == shape.series:
                continue
            else:
                its = map(SERIES, given)
            for series in its:
                if series not in columns and wanted(series[0], series[1]):
                    return place
        return -1

    def gather(self, moments: Sequence[Moment], *, whole: bool = False) -> list[Column]:
        """The columns of one block, in the order in which they first come; to be emptied afterwards.

        :param whole: sort all samples into columns, also those of a single evaluation.

        One function, although it does several things: it is on the step path, and calls are what costs there. So nothing
        is called for a sample or a column; what must be done for each value is done in C.
        """
        found: list[Column] = []
        begin, count = 0, len(moments)
        latest = self._latest
        at: Sequence[int]
        values: Sequence[float]
        steps: Sequence[int]
        self.plain = ()
        while begin < count:
            samples = moments[begin][1]
            if not samples:
                begin += 1
                continue
            # As many moments as come in one shape are taken at once.
            end = begin + 1
            shape = latest.get(len(samples))
            if type(samples) is Row and not (shape is not None and shape.twice):
                series = samples.series
                if shape is None or shape.series is not series:
                    shape = self._shape(series)
                    shape.series = series  # this very object comes again
                if not shape.twice:
                    while end < count:
                        others = moments[end][1]
                        if type(others) is not Row or others.series is not series:
                            break
                        end += 1
                    rows = list(map(_SAMPLES, moments[begin:end]))
                    at = range(begin, end)
                    steps = list(map(_STEP, rows))
                    for column, values in zip(shape.columns, zip(*map(_VALUES, rows), strict=True), strict=True):
                        if not column.at:
                            column.values, column.steps, column.at = values, steps, at
                            found.append(column)
                        elif type(column.at) is list:  # then these lists are its own
                            column.values += values  # type: ignore[operator]
                            column.steps += steps  # type: ignore[operator]
                            column.at += at
                        else:
                            column.values, column.steps = [*column.values, *values], [*column.steps, *steps]
                            column.at = [*column.at, *at]
                    begin = end
                    continue
            if shape is not None:
                for one, sample in zip(shape.series, samples, strict=True):
                    if (sample.metric, sample.labels, sample.phase) != one:
                        shape = None
                        break
            if shape is None:
                shape = self._shape(tuple(map(SERIES, samples)))
            if count == 1 and not (whole or shape.twice or self.several_phases):
                self.plain = shape.plain
                for index, column in shape.rest:
                    sample = samples[index]
                    column.values, column.steps, column.at = (sample.value,), (sample.step,), (0,)
                    found.append(column)
                return found
            size = len(shape.columns)
            if not shape.twice:
                series, same = shape.series, True
                while same and end < count:
                    others = moments[end][1]
                    if len(others) != size:
                        break
                    for one, sample in zip(series, others, strict=True):
                        if (sample.metric, sample.labels, sample.phase) != one:
                            same = False
                            break
                    else:
                        end += 1
            if end == begin + 1:
                at = (begin,)
                for column, sample in zip(shape.columns, samples, strict=True):
                    if not column.at:
                        column.values, column.steps, column.at = (sample.value,), (sample.step,), at
                        found.append(column)
                    elif type(column.at) is list:
                        column.values.append(sample.value)  # type: ignore[attr-defined]
                        column.steps.append(sample.step)  # type: ignore[attr-defined]
                        column.at.append(begin)
                    else:
                        column.values, column.steps = [*column.values, sample.value], [*column.steps, sample.step]
                        column.at = [*column.at, begin]
            else:
                at = range(begin, end)
                all_samples = list(chain.from_iterable(map(_SAMPLES, moments[begin:end])))
                all_values, all_steps = list(map(_VALUE, all_samples)), list(map(_STEP, all_samples))
                index = 0
                for column in shape.columns:
                    if not column.at:
                        column.values, column.steps, column.at = all_values[index::size], all_steps[index::size], at
                        found.append(column)
                    elif type(column.at) is list:
                        column.values += all_values[index::size]  # type: ignore[operator]
                        column.steps += all_steps[index::size]  # type: ignore[operator]
                        column.at += at
                    else:
                        column.values = [*column.values, *all_values[index::size]]
                        column.steps = [*column.steps, *all_steps[index::size]]
                        column.at = [*column.at, *at]
                    index += 1  # noqa: SIM113 - `enumerate` makes a pair for each
            begin = end
        return found

    def forget(self) -> None:
        """States are made or restored: find all anew."""
        self._columns.clear()
        self._shapes.clear()
        self._latest.clear()
        self._alike.clear()
        self._known = 0
        self.several_phases = False


def across_phases(columns: Sequence[Column], moments: Sequence[Moment]) -> list[Column]:
    """Where a metric comes in several phases in one block, rules on any phase get it as one column, in its order."""
    found: list[Column] = []
    done: set[int] = set()
    for column in columns:
        came = [one for one in column.phases if one.at]
        if len(came) < 2:
            found.append(column)
            continue
        metric, labels, _ = column.series
        apart = Column(
            column.series,
            None,
            [judge for judge in column.always if judge[0].phase != "any"],
            [judge for judge in column.paused if judge[0].phase != "any"],
            [state for state in column.absent if state.phase != "any"],
        )
        apart.values, apart.steps, apart.at = column.values, column.steps, column.at
        apart.origins = [(column, place) for place in range(len(column.values))]
        found.append(apart)
        if id(column.phases) in done:
            continue
        done.add(id(column.phases))
        whole = Column(
            (metric, labels, "any"),
            None,
            [judge for judge in column.always if judge[0].phase == "any"],
            [judge for judge in column.paused if judge[0].phase == "any"],
            [state for state in column.absent if state.phase == "any"],
        )
        entries = [(at, one.sample(moments, place)[0], one, place) for one in came for place, at in enumerate(one.at)]
        entries.sort(key=lambda entry: entry[:2])
        whole.at = [at for at, _, _, _ in entries]
        whole.origins = [(one, place) for _, _, one, place in entries]
        whole.values = [one.values[place] for one, place in whole.origins]
        whole.steps = [one.steps[place] for one, place in whole.origins]
        found.append(whole)
    return found


Run = tuple[Sequence[float], Sequence[int], Sequence[int]]
"""Values, their steps, and their moments."""


def merged(columns: Sequence[Column], moments: Sequence[Moment]) -> Run:
    """The samples of several series as one run, in the order in which they came."""
    if len(columns) == 1:
        only = columns[0]
        return only.values, only.steps, only.at
    entries = []
    for column in columns:
        for place, at in enumerate(column.at):
            entries.append((at, column.sample(moments, place)[0], column.values[place], column.steps[place]))
    entries.sort()  # no two samples have one place in one moment
    return [e[2] for e in entries], [e[3] for e in entries], [e[0] for e in entries]


# --------------------------------------------------------------------------- the last values of every series

HISTORY = 200
"""Values per series that :class:`History` keeps."""
HISTORY_SERIES = 512


class History:
    """The last values of every series, for evidence and for people who ask.

    Steps and values stand in turn in one deque: a pair for each would be one more thing for the garbage collector
    to count, and a loop that makes nothing of its own that stays would collect because of us.
    """

    def __init__(self) -> None:
        self._kept: dict[str, deque[float]] = {}

    def remember(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            name = sample.metric if not sample.labels else series_name(sample.metric, sample.labels)
            kept = self._kept.get(name)
            if kept is None:
                if len(self._kept) >= HISTORY_SERIES:
                    continue
                kept = self._kept[name] = deque(maxlen=2 * HISTORY)
            kept.extend((sample.step, sample.value))

    def __call__(self, series: str, n: int = HISTORY) -> list[tuple[int, float]]:
        """The last ``n`` values of a series as ``(step, value)``, oldest first."""
        kept = list(self._kept.get(series, ()))
        return list(zip(map(int, kept[::2]), kept[1::2], strict=True))[-n:]

    def series(self) -> list[str]:
        """Names of all series, in the order in which they were first seen."""
        return list(self._kept)

    def newest(self, series: str) -> float | None:
        """The last value of a series; None without any."""
        kept = self._kept.get(series)
        return kept[-1] if kept else None

    def charted(self, leave_out: Iterable[str] = ()) -> dict[str, float]:
        """The newest value of each series without labels that makes a chart.

        What was seen once does not, nor do signs that have been 0 or 1 all along: forty flat lines hide the others.
        """
        out = set(leave_out)
        names = [name for name in self._kept if "[" not in name and name not in out]
        return {name: values[-1] for name in names if _varies(values := list(self._kept[name])[1::2])}


def _varies(values: Sequence[float]) -> bool:
    newest = values[-1] if values else 0.0
    return len(values) > 1 and (newest not in (0.0, 1.0) or any(value != newest for value in values))


# --------------------------------------------------------------------------------------------------
# A value that is not finite because it grew without bound before: then the growth is the story, not the batch of that step.

LOOK_BACK = 50
"""Samples before the alert that are looked at."""
FEWEST = 3
GROWTH = 1e3
"""By how much the last finite value exceeds the first one of these samples."""
RECENT = 10
"""Steps within which the last finite value must lie."""
_EXPLODED = ": it exploded,"


def name_explosion(finding: Finding, history: Callable[[str, int], list[tuple[int, float]]]) -> None:
    """Change message and hint of what was found of a value that grew by a factor of a thousand and then broke.

    :param history: ``history(series, n)``: the last values of a series as (step, value).
    """
    if math.isfinite(finding.value) or not finding.series or _EXPLODED in finding.message:
        return
    before = [(at, abs(value)) for at, value in history(finding.series[0].name, LOOK_BACK) if at < finding.fired_step]
    finite = [(at, value) for at, value in before if math.isfinite(value)]
    if len(finite) < FEWEST or finding.fired_step - finite[-1][0] > RECENT:
        return
    ended, last = finite[-1]
    if last < GROWTH * finite[0][1] or last < max(value for _, value in finite):
        return
    # From the smallest value on: a quiet stretch before it is no part of the story.
    began, first = min(finite, key=lambda sample: (sample[1], -sample[0]))
    finding.message += f"{_EXPLODED} from {number(first)} to {number(last)} in {plural(ended - began, 'step')}"
    finding.hint = "lower the learning rate, warm it up or clip gradients: values grew long before they were not finite"


def complete(alert: Alert, history: History, accepted: Accepted, target: str) -> None:
    """Add what only its run knows of an alert: whether a value grew before it broke, and what is accepted as known.

    :param target: path of the script, for entries that hold for one script only.
    """
    for name, finding in zip(alert.names, alert.findings, strict=True):
        name_explosion(finding, history)
        series = [fact.name for fact in finding.series]
        finding.accepted = accepted.reason(name, series, target) if accepted.entries else ""
    alert.settle()
