"""Rows of a foreign format as batches of samples. The hot path of ``replay``.

Per set of columns and types a :class:`_Plan` is made once; a row then costs one look-up and its
samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from healthcheck.readers.base import Position
from healthcheck.readers.columns import Columns, Target
from healthcheck.readers.locate import says_eval
from healthcheck.readers.nulls import Nulls
from healthcheck.readers.values import to_number, to_seconds
from healthcheck.samples import Labels, Sample

Batch = tuple[int, float, list[Sample]]
Item = tuple[Position | None, Mapping[str, Any]]

_NAN = float("nan")
_MOST_PLANS = 4096


class _Plan:
    """How rows with these columns, of these types, are read."""

    __slots__ = ("cells", "epoch", "last", "names", "nulls", "series", "simple", "steps", "sums", "texts", "time")

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
        self.series = tuple((i, t.metric, t.labels, t.phase) for i, t in cells)
        self.sums = [
            (series, tuple(at[p] for p in parts))
            for series, parts in columns.sums.items()
            if all(p in at for p in parts)
        ]
        self.names: frozenset[tuple[str, Labels]] = frozenset(t.series for _, t in cells)
        self.simple = not (self.texts or self.nulls or self.sums) and all(t.scale == 1.0 for _, t in cells)
        self.last: int | None = None


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
        open_samples: list[Sample] = []
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
                samples = [Sample(m, step, values[i], labels, p, time) for i, m, labels, p in plan.series]
                names: set[tuple[str, Labels]] | frozenset[tuple[str, Labels]] = plan.names
            else:
                samples, names = self._samples(plan, row, values, step, time, phase)
            if not samples:
                continue
            # -- in which order ----------------------------------------------------
            if step == open_step:
                if names.isdisjoint(open_names):
                    open_samples += samples
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


def _same(samples: list[Sample], others: list[Sample]) -> bool:
    known = {(s.metric, s.labels): s.value for s in others}
    return all(
        known.get((s.metric, s.labels), _same) == s.value or (s.value != s.value and _is_nan(known, s)) for s in samples
    )


def _is_nan(known: dict[tuple[str, Labels], Any], sample: Sample) -> bool:
    value = known.get((sample.metric, sample.labels))
    return isinstance(value, float) and value != value
