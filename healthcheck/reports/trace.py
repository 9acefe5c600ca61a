"""Why a rule did what it did: the real engine over recorded samples, with every judgement written down.

Used by ``why`` for alerts of a run and by failing rule tests. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.engine.engine import Engine
from healthcheck.engine.series import SeriesState
from healthcheck.reports.samplelines import Batch
from healthcheck.rulelang.rule import RuleSet
from healthcheck.samples import Labels
from healthcheck.verdicts import Alert, State


@dataclass(slots=True)
class TraceRow:
    """One judgement of one rule: the sample, what it was compared with, where the series stood then."""

    step: int
    series: str
    value: float
    normal: float | None
    score: float | None
    state: State
    progress: str = ""
    """While pending: ``1 of 2``."""
    fired: bool = False
    cleared: bool = False


@dataclass(slots=True)
class Trace:
    """What a replay of a record gave."""

    engine: Engine
    rows: list[TraceRow]

    @property
    def alerts(self) -> list[Alert]:
        return self.engine.alerts


def retrace(rules: RuleSet, batches: Iterable[Batch], rule_id: str, *, start_step: int = 0, rank: int = 0) -> Trace:
    """Judge recorded evaluations again, exactly as the live run did, and keep each judgement of one rule.

    :param start_step: where the run began (after a resume).
    """
    engine = Engine(rules, start_step=start_step, rank=rank)
    rows: list[TraceRow] = []
    state = engine.by_id.get(rule_id)
    if state is not None:
        state.series = _Table(rows)
    previous: float | None = None
    for batch in batches:
        if engine.needs_watchdog and previous is not None:
            engine.tick(batch.now - previous, batch.now)
        previous = batch.now
        engine.evaluate(batch.at, batch.samples, batch.now)
    return Trace(engine, rows)


class _Heard:
    """Stands for one series in the engine's table and writes down each of its judgements.

    The engine keeps no history of scores, and the live path must not pay for one: so the replay
    listens from outside, and several samples of one evaluation all show.
    """

    __slots__ = ("_inner", "_rows")
    _inner: SeriesState
    _rows: list[TraceRow]

    def __init__(self, inner: SeriesState, rows: list[TraceRow]) -> None:
        object.__setattr__(self, "_inner", inner)
        object.__setattr__(self, "_rows", rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def feed(self, value: float, step: int, now: float) -> int:
        series = self._inner
        before, seen = series.state, series.n
        result: int = series.feed(value, step, now)
        if series.n == seen:  # not its turn (`every`), or another rule owns this value
            return result
        firing = series.state is State.FIRING
        progress = ""
        if series.state is State.PENDING and not series.seconds:
            have = sum(series.recent) if series.recent is not None else series.streak
            progress = f"{have} of {series.need}"
        fired, cleared = firing and before is not State.FIRING, before is State.FIRING and not firing
        normal = series.scorer.normal
        row = TraceRow(step, series.name, value, normal, series.score, series.state, progress, fired, cleared)
        self._rows.append(row)
        return result


class _Table(dict[Labels, Any]):
    """The series of one rule, each heard."""

    def __init__(self, rows: list[TraceRow]) -> None:
        super().__init__()
        self._rows = rows

    def __setitem__(self, labels: Labels, series: SeriesState | None) -> None:
        super().__setitem__(labels, _Heard(series, self._rows) if series is not None else None)


def episode_rows(rows: Sequence[TraceRow], series: str, fired_step: int) -> tuple[list[TraceRow], list[TraceRow]]:
    """The rows of one series from the first breach before ``fired_step`` to the clearing, and all rows before."""
    own = [row for row in rows if row.series == series]
    at = next((i for i, row in enumerate(own) if row.fired and row.step == fired_step), None)
    if at is None:
        return [], own
    first = at
    while first > 0 and own[first - 1].state is State.PENDING:
        first -= 1
    last = at
    while last + 1 < len(own) and not own[last].cleared:
        last += 1
    return own[first : last + 1], own[:first]
