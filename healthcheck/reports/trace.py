"""Why a rule did what it did: the real engine over recorded samples, with every judgement written down.

Used by ``why`` for alerts of a run and by failing rule tests. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from healthcheck.engine.engine import Engine
from healthcheck.engine.rulestate import RuleState
from healthcheck.reports.samplelines import Batch
from healthcheck.rulelang.rule import RuleSet
from healthcheck.samples import Sample
from healthcheck.verdicts import Alert, State, Transition


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
        _listen(state, rows)
    previous: float | None = None
    for batch in batches:
        if engine.needs_watchdog and previous is not None:
            engine.tick(batch.now - previous, batch.now)
        previous = batch.now
        engine.evaluate(batch.at, batch.samples, batch.now)
    return Trace(engine, rows)


def _listen(state: RuleState, rows: list[TraceRow]) -> None:
    """Stand between the engine and one rule, so that several samples of one evaluation all show."""
    judge = state.judge

    def judged(sample: Sample, value: float, now: float, transitions: list[Transition] | None) -> None:
        known = state.series.get(sample.labels)
        before = known.state if known is not None else State.NO_DATA
        seen = known.n if known is not None else 0
        judge(sample, value, now, transitions)
        series = state.series.get(sample.labels)
        if series is None or series.n == seen:
            return
        fired = series.state is State.FIRING and before is not State.FIRING
        cleared = before is State.FIRING and series.state is not State.FIRING
        progress = ""
        if series.state is State.PENDING and not series.seconds:
            have = sum(series.recent) if series.recent is not None else series.streak
            progress = f"{have} of {series.need}"
        rows.append(
            TraceRow(
                sample.step,
                series.name,
                value,
                series.scorer.normal,
                series.score,
                series.state,
                progress,
                fired,
                cleared,
            )
        )

    state.judge = judged  # type: ignore[method-assign]


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
