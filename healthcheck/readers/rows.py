"""Rows of a recorded run: which columns are the step, the epoch, the clock and the phase, and what an empty cell means."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from healthcheck.core.protocols import Position
from healthcheck.core.samples import NO_LABELS, Labels, Sample
from healthcheck.core.samples import Row as SampleRow
from healthcheck.readers.base import to_number, to_seconds
from healthcheck.readers.columns import (
    TIME_RANK,
    Columns,
    Row,
    Target,
    identify,
    joined,
    step_rank,
)
from healthcheck.readers.names import (
    EPOCH_NAMES,
    EVAL_WORDS,
    PHASE_COLUMNS,
    STEP_NAMES,
    TEST_WORDS,
    TRAIN_WORDS,
)

Numbers = Mapping[str, list[tuple[int, float]]]
"""Column -> (row index, number) for the first rows."""

_EPOCH_GROUP = len(STEP_NAMES) - 1


def says_eval(value: Any) -> bool:
    """Whether the text of a phase column means evaluation."""
    return isinstance(value, str) and value.lower() in EVAL_WORDS | TEST_WORDS


def find_phase(columns: Columns, peek: Sequence[Row]) -> None:
    for name in PHASE_COLUMNS:
        said = {str(row[name]).lower() for row in peek if isinstance(row.get(name), str)}
        if said & (EVAL_WORDS | TEST_WORDS | TRAIN_WORDS):
            columns.phase_column = name
            return


def find_steps(columns: Columns, peek: Sequence[Row], numbers: Numbers, apart: frozenset[int] = frozenset()) -> None:
    """``apart``: rows that are known to be of evaluations."""
    found = []
    for name, values in numbers.items():
        rank = step_rank(name)
        if rank is None or not values or name in columns.targets:
            continue
        if any(v != v or v != int(v) if abs(v) < 1e300 else True for _, v in values):
            continue
        if len(values) > 3 and len({v for _, v in values}) == 1:
            continue  # a setting, not a counter
        if rank[0] == _EPOCH_GROUP and not _one_row_per_epoch(name, values, numbers, apart):
            continue
        found.append((rank, name))
    found.sort()
    found = _counters(found, numbers)
    bearing = {
        i for n, values in numbers.items() if step_rank(n) is None and joined(n) not in TIME_RANK for i, _ in values
    }
    rows = len(bearing) or 1
    best: tuple[float, tuple[str, ...]] = (0.0, ())
    for rank, name in found:
        own = {i for i, _ in numbers[name]}
        names = [name]
        for other_rank, other in found:
            theirs = {i for i, _ in numbers[other]}
            if other != name and other_rank[0] == rank[0] and not own & theirs:
                names.append(other)
                own |= theirs
        share = len(own & bearing) / rows
        if share >= 0.9:
            best = (share, tuple(names))
            break
        if share > best[0] + 0.1:
            best = (share, tuple(names))
    columns.steps = best[1]
    if not columns.steps:
        columns.notes.append("no step column: rows counted from 1")


_INDEX = frozenset({"index", "idx", "unnamed_0", "_step", "batch_idx"})
"""Numbers of rows, not of updates."""


def _counters(found: list[tuple[tuple[int, int], str]], numbers: Numbers) -> list[tuple[tuple[int, int], str]]:
    """Without columns that do not count where another one does.

    Such are the steps taken in each episode beside ``episode``, and the steps of each round beside ``iteration``.
    """
    if any(joined(name) in EPOCH_NAMES for name in numbers):
        return found  # batches that begin again in each epoch
    falls = {name: sum(b < a for (_, a), (_, b) in pairwise(numbers[name])) for _, name in found}
    rises = {name: sum(b > a for (_, a), (_, b) in pairwise(numbers[name])) for _, name in found}
    # A second run that was appended falls once.
    steady = [name for name, count in falls.items() if count <= 0.05 * len(numbers[name]) and len(numbers[name]) > 3]
    fullest = max((len(numbers[name]) for name in steady), default=0)
    strict = [name for name in steady if rises[name] >= 0.9 * (len(numbers[name]) - 1) and joined(name) not in _INDEX]
    widest = max((len(numbers[name]) for name in strict), default=0)
    # Runs that were resumed from earlier points fall now and then, and count all the same.
    counts = [name for name in falls if rises[name] >= 0.8 * (len(numbers[name]) - 1) and joined(name) not in _INDEX]
    most = max((len(numbers[name]) for name in counts), default=0)
    kept = []
    for rank, name in found:
        rows = len(numbers[name])
        wavers = steady and falls[name] > 0.1 * rows and fullest >= 0.9 * rows
        wavers = wavers or (most >= 0.9 * rows and falls[name] > 0.05 * rows and rises[name] < 2 * falls[name])
        stands = strict and rises[name] < 0.3 * (rows - 1) and widest >= 0.9 * rows
        if not (wavers or stands):
            kept.append((rank, name))
    return kept


def _one_row_per_epoch(name: str, values: Sequence[tuple[int, float]], numbers: Numbers, apart: frozenset[int]) -> bool:
    """Whether an epoch column can count steps: no other column has several values in one epoch."""
    metrics = {n: sum(i not in apart for i, _ in v) for n, v in numbers.items() if step_rank(n) is None}
    known = [count for n, count in metrics.items() if identify(n).known]
    fullest = max(known or metrics.values(), default=0)
    # Changes, not different values: a second run that was appended begins at epoch 1 again.
    return fullest <= 1.5 * (1 + sum(b != a for (_, a), (_, b) in pairwise(values)))


def find_epoch(columns: Columns, peek: Sequence[Row], numbers: Numbers) -> None:
    columns.epoch = next((n for n in numbers if joined(n) in EPOCH_NAMES and numbers[n] and n not in columns.steps), "")
    if not columns.epoch or not columns.steps or step_rank(columns.steps[0]) is None:
        return
    epochs = dict(numbers[columns.epoch])
    steps = [
        (i, v) for name in columns.steps for i, v in numbers[name] if not says_eval(peek[i].get(columns.phase_column))
    ]
    steps.sort()
    changes = restarts = 0
    for (i, a), (j, b) in pairwise(steps):
        if epochs.get(j, 0) > epochs.get(i, 0):
            changes += 1
            restarts += b < a
    # Without any change so far the question is open; the rows are then watched one by one.
    columns.within_epoch = restarts * 2 > changes if changes else len(set(epochs.values())) == 1 and len(epochs) > 1


def find_time(columns: Columns, peek: Sequence[Row], numbers: Numbers) -> None:
    best: tuple[int, str, float] | None = None
    for name in numbers:
        plain = joined(name)
        scale = 1.0
        rank = TIME_RANK.get(plain)
        if rank is None and plain.removesuffix("_ms").removesuffix("_s").removesuffix("_sec") in TIME_RANK:
            rank = TIME_RANK[plain.removesuffix("_ms").removesuffix("_s").removesuffix("_sec")]
        if plain.endswith("_ms"):
            scale = 1e-3
        if rank is None or name in columns.steps or name in columns.targets:
            continue
        seconds = [s for row in peek if name in row and (s := to_seconds(row[name], scale)) is not None]
        falls = sum(b < a for a, b in pairwise(seconds))
        plainly_time = plain in ("time", "time_ms", "time_s", "time_sec")
        if not seconds or falls > len(seconds) * (0.05 if plainly_time else 0.34):
            if seconds and plainly_time:
                target = Target("time.step", NO_LABELS, "train", scale)
                if target.series not in columns.owners:
                    columns.targets[name] = target
                    columns.owners[target.series] = name
            continue
        if len(seconds) > 1 or len(peek) == 1:
            columns.targets[name] = None
            if best is None or rank < best[0]:
                best = (rank, name, scale)
    if best is not None:
        columns.time, columns.time_scale = best[1], best[2]


# --------------------------------------------------------------------------------------------------
# What a ``null`` means in JSON: a NaN that strict JSON could not write, or a cell without a value.
#
# A logger that leaves out what it has not got writes ``null`` only for a NaN: if rows have different
# keys, every ``null`` of a column that is otherwise numeric is a NaN. Where all rows have the same keys
# (a wide table turned into JSON), a ``null`` is an empty cell
#
# - if the row has a number in a column that never has one together with this column: it is a row of
#   another kind (evaluation rows between training rows);
# - if the column is *sparse*: an evaluation metric with gaps, or a column with numbers in under half of
#   the rows between its first and last number; unless the columns that always come with it have numbers.
#
# A row that has no learning rate either, where rows have one, is not of a step: some trainers close their
# record with such a row, all empty. Anything else is a NaN.


class Nulls:
    """Decides for one file, from its first rows."""

    def __init__(self, peek: Sequence[Row], special: frozenset[str], evaluation: frozenset[str] = frozenset()) -> None:
        self.special = special
        """Step, time and bookkeeping columns, which say nothing about the kind of a row."""
        self.rectangular = len({frozenset(row) for row in peek}) <= 1
        where: dict[str, list[int]] = {}
        for index, row in enumerate(peek):
            for name, value in row.items():
                if name not in special and to_number(value) is not None:
                    where.setdefault(name, []).append(index)
        self.numeric = set(where)
        self.rates = {n for n in where if identify(n).metric == "lr"}
        self.evaluation = evaluation
        self.text = {n for row in peek for n, v in row.items() if isinstance(v, str)} - self.numeric
        """Columns of words: nobody looks at their values again."""
        self.sparse = {
            n
            for n, at in where.items()
            if len(at) * 2 < at[-1] - at[0] + 1 or (n in evaluation and len(at) < 0.9 * (at[-1] + 1))
        }
        apart = {n: set(at) for n, at in where.items()}
        self.exclusive = {n: {m for m in apart if not apart[m] & apart[n]} for n in apart} if self.rectangular else {}
        self.companions = {
            n: {m for m in evaluation & set(apart) if m != n and apart[m] & apart[n]}
            if n in evaluation
            else {m for m in self.sparse if m != n and apart[m] == apart[n]}
            for n in self.sparse
        }

    def is_nan(self, name: str, row: Row) -> bool:
        """Whether the ``null`` of column ``name`` in this row is a NaN."""
        if name in self.special or name not in self.numeric:
            return False
        if self.rates and name not in self.evaluation and all(row.get(n, 0.0) is None for n in self.rates):
            return False
        if not self.rectangular:
            return True
        present = {n for n, v in row.items() if v is not None and n not in self.special}
        if present & self.exclusive[name]:
            return False
        return name not in self.sparse or bool(self.companions[name] & present)


def filled_with_nan(peek: Sequence[Row], evaluation: frozenset[str]) -> dict[str, tuple[int, int]]:
    """Evaluation columns whose empty cells were written as ``nan``: column -> (every, first row).

    Only where a number stands in every k-th row exactly, k > 1, at least four times, and NaN in all
    rows between. A NaN in a row where a number is due stays a NaN.
    """
    found = {}
    for name in evaluation:
        values = [(i, row[name]) for i, row in enumerate(peek) if isinstance(row.get(name), float)]
        at = [i for i, v in values if v == v]
        gaps = {b - a for a, b in itertools.pairwise(at)}
        if len(at) >= 4 and len(gaps) == 1 and min(gaps) > 1 and len(values) == len(peek):
            found[name] = (min(gaps), at[0])
    return found


# --------------------------------------------------------------------------------------------------
# Rows of a foreign format as batches of samples. The hot path of ``replay``.
#
# Per set of columns and types a :class:`_Plan` is made once; a row then costs one look-up and its
# samples.


Batch = tuple[int, float, Sequence[Sample]]
Item = tuple[Position | None, Mapping[str, Any]]

_NAN = float("nan")
_MOST_PLANS = 4096


class _Plan:
    """How rows with these columns, of these types, are read."""

    __slots__ = (
        "cells",
        "epoch",
        "last",
        "names",
        "nulls",
        "pick",
        "series",
        "simple",
        "steps",
        "sums",
        "texts",
        "time",
    )

    def __init__(
        self, columns: Columns, keys: tuple[str, ...], types: tuple[type, ...], phase: str, text: set[str]
    ) -> None:
        at = {key: i for i, key in enumerate(keys)}
        self.steps = tuple(at[s] for s in columns.steps if s in at)
        self.epoch = at.get(columns.epoch, -1) if columns.epoch else -1
        self.time = at.get(columns.time, -1) if columns.time else -1
        self.texts: list[tuple[int, str]] = []
        self.nulls: list[tuple[int, str]] = []
        cells: list[tuple[int, Target]] = []
        for i, (key, kind) in enumerate(zip(keys, types, strict=False)):
            if key == columns.phase_column:
                continue
            if kind is float or kind is int:
                target = columns.target(key, phase)
                if target is not None:
                    cells.append((i, target))
            elif kind is str:
                if key not in text:
                    self.texts.append((i, key))
            elif kind is type(None):
                self.nulls.append((i, key))
        self.cells = cells
        self.series = tuple((t.metric, t.labels, t.phase) for _, t in cells)
        self.pick = _picker([i for i, _ in cells])
        self.sums = [
            (series, tuple(at[p] for p in parts))
            for series, parts in columns.sums.items()
            if all(p in at for p in parts)
        ]
        self.names: frozenset[tuple[str, Labels]] = frozenset(t.series for _, t in cells)
        self.simple = not (self.texts or self.nulls or self.sums) and all(t.scale == 1.0 for _, t in cells)
        self.last: int | None = None


def _picker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Takes the values at some places out of a row."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple(values[i] for i in places)


class RowReader:
    """One pass over one file."""

    def __init__(self, columns: Columns, nulls: Nulls, notes: list[str], resumed: Callable[[int, int], None]) -> None:
        self.columns = columns
        self.nulls = nulls
        self.notes = notes
        self.resumed = resumed
        self.text = nulls.text
        self.plans: dict[Any, _Plan] = {}
        self.null_columns: dict[str, int] = {}
        self.repeated = 0
        self.rows = 0
        self._offset = 0
        self._epoch: float | None = None
        self._in_epoch = 0
        self._first_time: float | None = None
        self._last_time = 0.0

    def batches(self, items: Iterator[Item]) -> Iterator[Batch]:
        columns = self.columns
        plans = self.plans
        watch_epochs = columns.within_epoch
        phase_column = columns.phase_column
        counted = not columns.steps and not columns.positioned
        step: int = 0
        time = 0.0
        last = -(1 << 62)
        open_step: int | None = None
        open_time = 0.0
        open_samples: Sequence[Sample] = []
        open_plan: _Plan | None = None
        open_names: set[tuple[str, Labels]] | frozenset[tuple[str, Labels]] = frozenset()
        for position, row in items:
            values = list(row.values())
            key: Any = (tuple(row), tuple(map(type, values)))
            phase = "train"
            if phase_column or position is not None:
                phase = self._phase(position, row)
                key = (key, phase)
            plan = plans.get(key)
            if plan is None:
                plan = self._plan(key, row, values, phase)
            # -- where -------------------------------------------------------------
            if position is not None and position.step is not None:
                step = position.step
            elif counted:
                step += bool(plan.cells or plan.texts or plan.nulls)
            elif plan.steps:
                value = values[plan.steps[0]]
                if value.__class__ is not int:
                    value = self._whole(plan.steps, values)
                if value is not None:
                    if watch_epochs:
                        value = self._over_epochs(value, plan, values, phase)
                    step = value
            if position is not None and position.time is not None:
                time = self._clock(position.time)
            elif plan.time >= 0:
                seconds = to_seconds(values[plan.time], columns.time_scale)
                if seconds is not None:
                    time = self._clock(seconds)
            # -- what --------------------------------------------------------------
            if plan.simple:
                samples: Sequence[Sample] = SampleRow(plan.series, step, plan.pick(values), time)
                names: set[tuple[str, Labels]] | frozenset[tuple[str, Labels]] = plan.names
            else:
                samples, names = self._samples(plan, row, values, step, time, phase)
            if not samples:
                continue
            # -- in which order ----------------------------------------------------
            if step == open_step:
                if names.isdisjoint(open_names):
                    open_samples = [*open_samples, *samples]
                    open_names = open_names | names
                    open_time = time
                    plan.last = step
                    continue
                if _same(samples, open_samples):
                    self.repeated += 1
                    continue
            if open_step is not None:
                yield open_step, open_time, open_samples
            if step < last:
                before = self._before(names, step)
                if before is not None:
                    self.resumed(before, step)
                    for other in plans.values():
                        other.last = None
                last = step
            elif step > last:
                last = step
            plan.last = step
            open_step, open_time, open_samples, open_plan, open_names = step, time, samples, plan, names
        if open_step is not None and open_plan is not None:
            yield open_step, open_time, open_samples
        self._say()

    # -- the cold side ----------------------------------------------------------------

    def _plan(self, key: Any, row: Mapping[str, Any], values: list[Any], phase: str) -> _Plan:
        if len(self.plans) >= _MOST_PLANS:
            self.plans.clear()
        plan = self.plans[key] = _Plan(self.columns, tuple(row), tuple(map(type, values)), phase, self.text)
        return plan

    def _phase(self, position: Position | None, row: Mapping[str, Any]) -> str:
        if position is not None and position.phase is not None:
            return position.phase
        return "eval" if says_eval(row.get(self.columns.phase_column)) else "train"

    def _whole(self, at: tuple[int, ...], values: list[Any]) -> int | None:
        for i in at:
            number = to_number(values[i])
            if number is not None and abs(number) < 1e18:
                return int(number)
        return None

    def _over_epochs(self, value: int, plan: _Plan, values: list[Any], phase: str) -> int:
        """A step that starts again in every epoch, counted on."""
        if phase == "eval":
            return self._offset + self._in_epoch
        epoch = to_number(values[plan.epoch]) if plan.epoch >= 0 else None
        if epoch is not None:
            if self._epoch is not None and epoch > self._epoch and value <= self._in_epoch:
                self._offset += self._in_epoch + (value == 0)  # counted from 0 or from 1
            self._epoch = epoch
        self._in_epoch = value
        return self._offset + value

    def _clock(self, seconds: float) -> float:
        if self._first_time is None:
            self._first_time = seconds
        time = seconds - self._first_time
        if time < self._last_time:
            if time < self._last_time * 0.5:  # the clock began again: go on from where it stood
                self._first_time -= self._last_time - time
            return self._last_time
        self._last_time = time
        return time

    def _samples(
        self, plan: _Plan, row: Mapping[str, Any], values: list[Any], step: int, time: float, phase: str
    ) -> tuple[list[Sample], set[tuple[str, Labels]]]:
        cells = [(values[i] * t.scale if t.scale != 1.0 else values[i], t) for i, t in plan.cells]
        for i, key in plan.texts:
            number = to_number(values[i])
            if number is not None and (target := self.columns.target(key, phase)) is not None:
                cells.append((number * target.scale, target))
        for _, key in plan.nulls:
            if self.nulls.is_nan(key, row) and (target := self.columns.target(key, phase)) is not None:
                self.null_columns[key] = self.null_columns.get(key, 0) + 1
                cells.append((_NAN, target))
        names = {t.series for _, t in cells}
        samples = [Sample(t.metric, step, value, t.labels, t.phase, time) for value, t in cells]
        for (metric, labels), parts in plan.sums:
            numbers = [to_number(values[i]) for i in parts]
            numbers = [
                _NAN if n is None and values[i] is None and self._null_part(row, i) else n
                for n, i in zip(numbers, parts, strict=False)
            ]
            if None not in numbers:
                total = sum(n for n in numbers if n is not None)
                samples.insert(
                    0, Sample(metric, step, total, labels, "eval" if metric.startswith("eval.") else "train", time)
                )
                names.add((metric, labels))
        return samples, names

    def _null_part(self, row: Mapping[str, Any], index: int) -> bool:
        return self.nulls.is_nan(list(row)[index], row)

    def _before(self, names: set[tuple[str, Labels]] | frozenset[tuple[str, Labels]], step: int) -> int | None:
        """The last step of rows with these series, if it is not before ``step``: then the run went back.

        Series that are merely written late (an evaluation a few steps behind) are no resume.
        """
        seen = [p.last for p in self.plans.values() if p.last is not None and not p.names.isdisjoint(names)]
        return max(seen) if seen and max(seen) >= step else None

    def _say(self) -> None:
        for name, count in self.null_columns.items():
            self.notes.append(f'{count} values of "{name}" are null: read as NaN (strict JSON cannot write NaN)')
        if self.repeated:
            self.notes.append(f"{self.repeated} rows repeat the row before them exactly; dropped")


def _same(samples: Sequence[Sample], others: Sequence[Sample]) -> bool:
    known = {(s.metric, s.labels): s.value for s in others}
    return all(
        known.get((s.metric, s.labels), _same) == s.value or (s.value != s.value and _is_nan(known, s)) for s in samples
    )


def _is_nan(known: dict[tuple[str, Labels], Any], sample: Sample) -> bool:
    value = known.get((sample.metric, sample.labels))
    return isinstance(value, float) and value != value
