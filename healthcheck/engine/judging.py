"""From a block of evaluations to what changes in it: every rule judges its series, a run of samples at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

from healthcheck.core.samples import Labels, Sample, Series
from healthcheck.engine.columns import Column, Judge, Moment, Shapes, across_phases
from healthcheck.engine.lookups import NEVER, Lookups
from healthcheck.engine.rulestate import CauseState, Side
from healthcheck.engine.series import CHANGED, Mark, SeriesState
from healthcheck.rulelang.rule import Derived

NAN = float("nan")
_CLOCK = itemgetter(2)
"""Of a moment."""

Marked = tuple[int, int, int, Mark, "Sample | None"]
"""A change in a block: its evaluation, the place of its rule in the file, that of the sample; the change, and the sample."""
_Marks = list[Marked]


class BlockJudge:
    """Judges blocks by rules; nothing here knows what an alert is.

    :param states: the rules, in file order.
    :param recorded: the absence of a metric that a record never had, and is not ``known`` to be asked for, is not judged.
    :param watch_transitions: tell every change, not only those that begin or end an episode.
    :param met: hears of each series when it is seen for the first time, before it is judged.
    """

    def __init__(
        self,
        states: Sequence[CauseState],
        derived: Sequence[Derived],
        *,
        recorded: bool,
        known: Collection[str],
        watch_transitions: bool,
        met: Callable[[str, Labels], None],
    ) -> None:
        self.states = states
        self.recorded = recorded
        self.known = known
        self.watch_transitions = watch_transitions
        self._met_series = met
        self.failures: list[Exception] = []
        """What conditions have raised; whoever calls :meth:`marks` takes them from here, after what it returned."""
        self._place = {state.cause.id: i for i, state in enumerate(states)}
        # Absence is judged by the clock and siblings by what came together: both stand outside the columns.
        self._absent_steps = [state for state in states if state.cause.condition.absence == "steps"]
        self._absent_seconds = [state for state in states if state.cause.condition.absence == "seconds"]
        self._grouped = [state for state in states if state.across]
        self.lookups = Lookups(states, derived)
        self._by_metric: dict[str, list[CauseState]] = {}
        for state in states:
            self._by_metric.setdefault(state.cause.selector.metric, []).append(state)
        self._shapes = Shapes(self._column)

    @property
    def needs_watchdog(self) -> bool:
        return bool(self._absent_seconds)

    @property
    def first_budget(self) -> float:
        """The longest ``first`` of rules on silence, in seconds: what is slow once may take so long."""
        return max((state.cause.condition.first for state in self._absent_seconds), default=0.0)

    @property
    def counts_steps(self) -> bool:
        """Whether an evaluation without any sample means something to a rule (``missing``)."""
        return bool(self._absent_steps)

    def first_new(self, moments: Sequence[Moment], wanted: Callable[[str, Labels], bool]) -> int:
        """See :meth:`healthcheck.engine.columns.Shapes.first_new`."""
        return self._shapes.first_new(moments, wanted)

    def forget(self) -> None:
        """States were restored or rewound: find all anew."""
        self._shapes.forget()

    def marks(self, moments: Sequence[Moment]) -> list[Marked]:
        """What changes in a block of evaluations; empty for nearly all."""
        shapes = self._shapes
        columns = shapes.gather(moments, whole=bool(self._grouped))
        marks: _Marks = []
        changed: list[CauseState] = []
        try:
            if columns:
                changed = self.lookups.take(columns, moments, shapes.column)
        except Exception as error:  # a condition of somebody's: the rules that do not need it are judged all the same
            self.failures.append(error)
            changed = self.lookups.recover()
        if shapes.plain:
            self._judge_singly(shapes.plain, marks, moments)
        clocks: list[float] | None = None
        absent: list[tuple[CauseState, Column]] = []
        for column in columns if not shapes.several_phases else across_phases(columns, moments):
            values, steps, at = column.values, column.steps, column.at
            count = len(values)
            if count == 1:
                low = high = values[0]
                finite = low - low == 0.0
            else:
                total = sum(values)
                finite = total - total == 0.0
                low, high = (min(values), max(values)) if finite else (NAN, NAN)
            times: Sequence[float] | None = None
            if column.paused and (top := steps[-1] if count == 1 else max(steps)) >= column.due:
                # Rules with ``every``. Until step `due` none of them has anything to do. Those that look equally often share
                # the values whose turn it is; nothing is called for one of which nothing changes.
                due, cut = NEVER, (0, 0)
                for state, series in column.paused:
                    if series is None or state.shut or state.changes:
                        again = self._wait_for_turn(state, series, column, top, marks, moments)
                        if again < due:
                            due = again
                        continue
                    bucket, every = series.bucket, series.every
                    if top // every > bucket:
                        if cut != (every, bucket):
                            cut, turns, place = (every, bucket), [], 0
                            its_values, its_steps, its_finite = list[float](), list[int](), True
                            for step in steps:
                                if step // every > bucket:  # one of each bucket, and none that comes late
                                    bucket = step // every
                                    value = values[place]
                                    its_finite = its_finite and value - value == 0.0
                                    its_values.append(value)
                                    its_steps.append(step)
                                    turns.append(place)
                                place += 1  # noqa: SIM113 - `enumerate` costs more for a run of one
                            its_low, its_high = (min(its_values), max(its_values)) if its_finite else (NAN, NAN)
                            newest = bucket
                        series.bucket = bucket = newest
                        if series.idle_from <= its_low and its_high <= series.idle_to:
                            series.n += len(turns)
                            series.last_step, series.value = its_steps[-1], its_values[-1]
                        else:
                            try:
                                if its_finite and not (found := series.update(its_values, its_steps, series.quiet)):
                                    series.n += len(turns)
                                    series.last_step, series.value = its_steps[-1], its_values[-1]
                                else:
                                    its_times = list[float]()  # a comprehension would cost a call
                                    for place in turns:
                                        its_times.append(moments[at[place]][2])
                                    changes = (
                                        series.take(found, its_values, its_steps, its_times, 0, len(turns))
                                        if its_finite
                                        else series.run(its_values, its_steps, its_times)
                                    )
                                    if changes:
                                        self._mark(state, column, turns, changes, marks, moments)
                            except Exception as error:
                                self.failures.append(error)
                    again = (bucket + 1) * every
                    if again < due:
                        due = again
                column.due = due
            for state, series in column.always:
                # Most samples change nothing, and calls are what costs: those are noted here.
                if series is not None and not state.changes and not state.shut:
                    if series.idle_from <= low and high <= series.idle_to:
                        series.n += count
                        series.last_step = steps[-1]
                        series.value = values[-1]
                        continue
                    if finite or series.nonfinite_ok:
                        try:
                            found = series.update(values, steps, series.quiet)
                            if not found:
                                series.n += count
                                series.last_step = steps[-1]
                                series.value = values[-1]
                                continue
                            if times is None:
                                if clocks is None:
                                    clocks = list(map(_CLOCK, moments))
                                whole = type(at) is range and count == len(clocks)
                                times = clocks if whole else [clocks[moment] for moment in at]
                            changes = series.take(found, values, steps, times, 0, count)
                        except Exception as error:
                            self.failures.append(error)
                            continue
                        if changes:
                            self._mark(state, column, None, changes, marks, moments)
                        continue
                self._judge_column(state, column, marks, moments)
            if column.absent:
                absent += [(state, column) for state in column.absent]
        if absent or self._absent_steps or (self._absent_seconds and (len(moments) > 1 or moments[0][3] is not None)):
            self._judge_absence(absent, marks, moments)
        if self._grouped:
            self._judge_groups(columns, marks, moments)
        for column in columns:
            column.at = ()
        for state in changed:
            for _, whose, said in state.changes:
                _say(whose, said)
            state.changes, state.starts = [], []
        return marks

    def _judge_singly(self, plain: Sequence[tuple[int, Column]], marks: _Marks, moments: Sequence[Moment]) -> None:
        """What the loop of :meth:`judge` does, for samples that need not be sorted into columns first.

        Where steps are long each is a block of its own, and to sort would be most of the work.
        """
        _, samples, now, _ = moments[0]
        for index, column in plain:
            sample = samples[index]
            value, step = sample.value, sample.step
            values: tuple[float, ...] | None = None
            for state, series in column.always:
                if series is None or state.changes or state.shut:
                    column.values, column.steps, column.at = (value,), (step,), (0,)
                    self._judge_column(state, column, marks, moments)
                    column.at = ()
                    continue
                if series.idle_from <= value <= series.idle_to:
                    series.n += 1
                    series.last_step = step
                    series.value = value
                    continue
                # The run of one sample is made once for all that judge it, and not at all if nobody needs it.
                if values is None:
                    values, steps, finite = (value,), (step,), value - value == 0.0
                try:
                    if finite or series.nonfinite_ok:
                        found = series.update(values, steps, series.quiet)
                        if not found:
                            series.n += 1
                            series.last_step = step
                            series.value = value
                            continue
                        changes = series.take(found, values, steps, (now,), 0, 1)
                    else:
                        changes = series.run(values, steps, (now,))
                except Exception as error:
                    self.failures.append(error)
                    continue
                order = self._place[state.cause.id]
                marks += [
                    (0, order, index, m, sample) for m in changes if m.result != CHANGED or self.watch_transitions
                ]

    # -- which rules judge what -------------------------------------------------------

    def _column(self, series: Series) -> Column:
        """Who judges samples of a series that was not seen before."""
        metric, labels, phase = series
        self._met_series(metric, labels)
        always: list[Judge] = []
        paused: list[Judge] = []
        absent: list[CauseState] = []
        for state in self._by_metric.get(metric, ()):
            if state.phase not in ("any", phase) or state.across:
                continue
            if state.cause.condition.absence:
                if state.cause.selector.matches(labels):
                    absent.append(state)
                continue
            if state.cause.only_if and labels not in state.series:
                if not state.cause.selector.matches(labels):
                    continue
                one = None  # a series is made when its guards hold for the first time
            else:
                one = state.state_of(labels)
                if one is None:
                    continue
            (always if state.cause.every == 1 else paused).append((state, one))
        return Column(series, self.lookups.watch(metric, labels), always, paused, absent)

    def _met(self, state: CauseState, column: Column) -> SeriesState | None:
        """The guards of a rule hold for the first time: from now on it has its series."""
        series = state.state_of(column.series[1])
        column.always = [(s, series if s is state else known) for s, known in column.always]
        column.paused = [(s, series if s is state else known) for s, known in column.paused]
        return series

    def _wait_for_turn(
        self,
        state: CauseState,
        series: SeriesState | None,
        column: Column,
        top: int,
        marks: _Marks,
        moments: Sequence[Moment],
    ) -> int:
        """A rule with ``every`` whose guards or parts have something to say; returns the step of its next turn.

        A rule that its guard holds back keeps its bucket open, so that it judges as soon as it may.

        :param top: the largest step in the column.
        """
        every = state.cause.every
        if top // every > (state.start_step // every if series is None else series.bucket):
            self._judge_column(state, column, marks, moments)
        return (_bucket(state, column.series[1]) + 1) * every

    def _judge_column(self, state: CauseState, column: Column, marks: _Marks, moments: Sequence[Moment]) -> None:
        """Judge a series by one rule, whatever its guards say."""
        try:
            if state.changes:
                self._in_pieces(state, column, marks, moments)
            else:
                self._judge_part(state, column, 0, len(column.values), marks, moments)
        except Exception as error:
            self.failures.append(error)

    def _in_pieces(self, state: CauseState, column: Column, marks: _Marks, moments: Sequence[Moment]) -> None:
        """Judge a series by a rule of which a guard or a part changes in this block: cut where it does."""
        at = column.at
        for whose, said in state.starts:
            _say(whose, said)
        begin = 0
        for moment, whose, said in state.changes:
            end = bisect_left(at, moment)
            if end > begin:
                self._judge_part(state, column, begin, end, marks, moments)
                begin = end
            _say(whose, said)
        if begin < len(at):
            self._judge_part(state, column, begin, len(at), marks, moments)

    def _judge_part(
        self, state: CauseState, column: Column, begin: int, end: int, marks: _Marks, moments: Sequence[Moment]
    ) -> None:
        """Judge a part of a column by one rule."""
        if state.shut:
            every = state.cause.every
            bucket = _bucket(state, column.series[1]) if every > 1 else -NEVER
            state.held += sum([step // every > bucket for step in column.steps[begin:end]])
            return
        series = state.series.get(column.series[1]) or self._met(state, column)
        if series is None:
            return
        places: Sequence[int] = range(begin, end)
        if series.every > 1:
            bucket, every, steps, turns = series.bucket, series.every, column.steps, []
            for place in places:
                if steps[place] // every > bucket:  # one of each bucket, and none that comes late
                    bucket = steps[place] // every
                    turns.append(place)
            if not turns:
                return
            places, series.bucket = turns, bucket
        at = column.at
        changes = series.run(
            [column.values[place] for place in places],
            [column.steps[place] for place in places],
            [moments[at[place]][2] for place in places],
        )
        if changes:
            self._mark(state, column, places, changes, marks, moments)

    def _mark(
        self,
        state: CauseState,
        column: Column,
        places: Sequence[int] | None,
        changes: Sequence[Mark],
        marks: _Marks,
        moments: Sequence[Moment],
    ) -> None:
        """Keep what a run did, with the evaluation and the place in it to which each change belongs."""
        at, order = column.at, self._place[state.cause.id]
        for mark in changes:
            if mark.result == CHANGED and not self.watch_transitions:
                continue
            place = mark.place if places is None else places[mark.place]
            where, sample = column.sample(moments, place)
            marks.append((at[place], order, where, mark, sample))

    def _judge_groups(self, columns: Sequence[Column], marks: _Marks, moments: Sequence[Moment]) -> None:
        """``outlier`` compares what came together: evaluation by evaluation."""
        for state in self._grouped:
            metric = state.cause.selector.metric
            groups: dict[int, list[tuple[int, Sample]]] = {}
            for column in columns:
                if column.series[0] == metric:
                    for place, at in enumerate(column.at):
                        groups.setdefault(at, []).append(column.sample(moments, place))
            order = self._place[state.cause.id]
            for at in sorted(groups):
                group = [sample for _, sample in sorted(groups[at], key=lambda entry: entry[0])]
                for nth, (sample, mark) in enumerate(state.judge_siblings(group, moments[at].now)):
                    marks.append((at, order, nth, mark, sample))

    def _judge_absence(
        self, arrivals: Sequence[tuple[CauseState, Column]], marks: _Marks, moments: Sequence[Moment]
    ) -> None:
        """What came of metrics whose absence is watched; and ``missing``, which counts evaluations without them."""
        came: dict[str, list[tuple[int, int, Column, int]]] = {}
        for state, column in arrivals:
            entries = came.setdefault(state.cause.id, [])
            # The place among the samples of a moment only matters where a rule watches several series.
            several = len(entries) > 0
            entries += [(at, place, column, place) for place, at in enumerate(column.at)]
            if several:
                entries[:] = [(at, c.sample(moments, p)[0], c, p) for at, _, c, p in entries]
        looks = []
        for at, moment in enumerate(moments):
            if moment[3] is not None:
                looks.append(at)
        for state in self._absent_seconds if not self._absent_steps else [*self._absent_steps, *self._absent_seconds]:
            arrived = came.get(state.cause.id)
            counts = state.cause.condition.absence == "steps"
            if not (arrived or counts or looks):
                continue
            entries = sorted(arrived or (), key=lambda entry: entry[:2])
            order, nth = self._place[state.cause.id], 0
            for at in range(len(moments)) if counts else sorted({*looks, *[entry[0] for entry in entries]}):
                step, _, now, silent = moments[at]
                while nth < len(entries) and entries[nth][0] == at:
                    _, _, column, place = entries[nth]
                    mark = state.present(column.series[1], column.steps[place], now)
                    if mark is not None:
                        where, sample = column.sample(moments, place)
                        marks.append((at, order, where, mark, sample))
                    nth += 1
                # Steps are counted at evaluations, seconds where somebody looks.
                if (silent is None) is counts and not (self.recorded and self._never_had(state)):
                    for mark in state.judge_absence(silent, step, now):
                        marks.append((at, order, NEVER, mark, None))

    def _never_had(self, state: CauseState) -> bool:
        """Whether a record cannot tell if this metric was absent: it never had it, and was not asked to."""
        return not state.samples and state.cause.selector.key not in self.known


def _bucket(state: CauseState, labels: Labels) -> int:
    """The bucket of ``every`` in which a rule has judged a series last."""
    series = state.series.get(labels)
    return state.start_step // state.cause.every if series is None else series.bucket


def _say(whose: CauseState | Side, said: bool | None) -> None:
    """What a guard or a part says from here on."""
    if isinstance(whose, Side):
        whose.breach = said
    else:
        whose.shut = bool(said)
