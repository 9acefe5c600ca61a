"""How one rule came to its verdict, step by step: value, score, normal and state.

The shared part of ``healthcheck why`` and of the failure text of rule tests. It runs the real
engine over the samples once more and looks at one rule between the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cmp_to_key

from healthcheck.core.alerts import State
from healthcheck.core.protocols import Bound, Comparator
from healthcheck.core.samples import Labels, Sample
from healthcheck.engine.columns import Moment, step_by_step
from healthcheck.engine.engine import Engine
from healthcheck.engine.rulestate import CauseState
from healthcheck.engine.series import SeriesState
from healthcheck.rulelang.comparators import closeness
from healthcheck.rulelang.rule import RuleSet, owners


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One series of one rule after one evaluation."""

    step: int
    series: str
    value: float | None
    """None: no sample came, and the state stays as it was."""
    score: float | None
    normal: float | None
    state: State
    progress: str = ""
    """On the way into or out of an episode: ``1 of 3``, ``12 s of 30 s``, ``clearing 1 of 3``."""
    silent: bool = False
    """Judged by the clock (``stale``, ``missing``): ``score`` counts seconds or steps."""
    fired: bool = False
    """An episode began here; ``cleared``: it ended here. By comparison with the row before."""
    cleared: bool = False
    note: str = ""
    """Why this sample was not judged: ``warm-up until step 100``, ``held by only_if amp.skipped``."""
    key: str = ""
    """The key of the rule that kept it from being judged: ``min_samples``, ``warmup``, ``only_if``, ``every``."""
    bound: Bound | None = None
    """The values that would not have breached here; None where no interval says it, or nobody asked for it."""

    @property
    def words(self) -> str:
        """``pending (1 of 3)``; the note where there is one."""
        extra = ", ".join(filter(None, (self.progress, self.note)))
        return f"{self.state} ({extra})" if extra else str(self.state)


def judgements(
    rules: RuleSet,
    rule_id: str,
    batches: Iterable[Moment | tuple[int, Sequence[Sample], float]],
    *,
    first: int = 0,
    last: int | None = None,
    start_step: int = 0,
    rank: int = 0,
    recorded: bool = False,
    bounds: bool = False,
) -> Iterator[TraceRow]:
    """Every row of one rule, all its series, in the order in which the engine judged.

    :param rules: the rule set of the run. Derived metrics keep state in it: hand in a fresh one.
    :param batches: all samples from the start, since detectors learn from them.
    :param first: rows before this step are not made; ``last``: batches after it are not read.
    :param start_step: the step after which the run began (a resume), as for :class:`Engine`.
    :param bounds: whether rows have their ``bound``.

    Raises ``KeyError`` if the rule is not in ``rules``.
    """
    if not any(rule.id == rule_id for rule in rules.causes):
        raise KeyError(rule_id)
    engine = Engine(_needed(rules, rule_id), rank=rank, recorded=recorded, start_step=start_step, every_score=True)
    state = engine.by_id.get(rule_id)
    if state is None:
        return  # a rule of rank zero, seen from another rank
    owner = owners(rules.causes, rules.derived).get(rule_id, "")
    stood: dict[str, State] = {}
    wide: dict[str, Bound | None] = {}
    for given in batches:
        batch = Moment(*given)
        if last is not None and batch.step > last:
            break
        wanted = batch.step >= first
        # As the live run cut it: guards and formulas belong to the step of their sample. Looked at after each part,
        # since values of two steps may have arrived together, and a row belongs to the step of its value.
        parts: Sequence[Sequence[Sample]] = ((),) if batch.silent is not None else step_by_step(batch.samples)
        for part in parts:
            counts = {labels: one.n for labels, one in state.series.items() if one is not None} if wanted else {}
            held = state.held
            if batch.silent is not None:
                engine.tick(batch.silent, batch.now)
            else:
                engine.evaluate(batch.step, part, batch.now)
            if not wanted:
                continue
            at = part[0].step if part else batch.step
            seen = batch._replace(samples=part)
            for row in _look(state, seen, at, counts, _guards(state) if state.held > held else "", owner):
                was_firing, firing = stood.get(row.series) is State.FIRING, row.state is State.FIRING
                stood[row.series] = row.state
                bound = wide.get(row.series)  # before this sample was learnt
                yield replace(row, fired=firing and not was_firing, cleared=was_firing and not firing, bound=bound)
            if bounds and state.cause.condition.bounded:
                wide.update(
                    (one.name, one.scorer.bound(one.healthy)) for one in state.series.values() if one is not None
                )


def trace(
    rules: RuleSet,
    rule_id: str,
    batches: Iterable[Moment | tuple[int, Sequence[Sample], float]],
    around: int,
    before: int = 2,
    after: int = 2,
    *,
    series: str = "",
    start_step: int = 0,
    rank: int = 0,
    recorded: bool = False,
) -> list[TraceRow]:
    """One series of one rule at the steps ``around - before`` to ``around + after``.

    :param series: the series to show; without it the one that stood worst at ``around``.

    Everything else as in :func:`judgements`.
    """
    seen: dict[str, list[TraceRow]] = {}
    found = judgements(
        rules,
        rule_id,
        batches,
        first=around - before,
        last=around + after,
        start_step=start_step,
        rank=rank,
        recorded=recorded,
    )
    for row in found:
        rows = seen.setdefault(row.series, [])
        if row.silent:
            _add_silence(rows, row)
        else:
            rows.append(row)
    if series:
        return seen.get(series, [])
    rule = rules.cause(rule_id)
    return _worst(list(seen.values()), around, rule.condition.breaches)


def _needed(rules: RuleSet, rule_id: str) -> RuleSet:
    """The cause, and those that own its non-finite samples: nothing else changes its states."""
    return rules.keeping(lambda cause: cause.id == rule_id or cause.condition.judges_nonfinite)


def _guards(state: CauseState) -> str:
    return "held by only_if " + ", ".join(guard.metric for guard in state.cause.only_if)


def _look(
    state: CauseState, batch: Moment, at: int, counts: dict[Labels, int], guarded: str, owner: str
) -> Iterator[TraceRow]:
    """The rows of all series after one part of an evaluation.

    :param at: step of the samples of this part; absence is judged at the step of the evaluation.
    """
    cause = state.cause
    values = {
        s.labels: s.value
        for s in batch.samples
        if s.metric == cause.selector.metric and cause.phase in ("any", s.phase)
    }
    for labels, series in state.series.items():
        if series is None:
            continue
        step = batch.step if cause.condition.absence else at
        row = TraceRow(step, series.name, values.get(labels), None, None, series.state)
        came = labels in values or series.n > counts.get(labels, 0)
        if cause.condition.absence:
            yield replace(row, score=series.score, progress=progress(series, batch.now), silent=True)
        elif batch.silent is not None:
            continue
        elif not came:
            yield replace(row, note=guarded or "no sample", key="only_if" if guarded else "")
        elif series.n == counts.get(labels, 0):
            value = values[labels]
            owned = owner and not math.isfinite(value)
            if guarded:
                yield replace(row, note=guarded, key="only_if")
            elif owned:
                yield replace(row, note=f"{owner} has it")
            else:
                yield replace(row, note=f"every {cause.every} steps", key="every")
        else:
            nonfinite = not math.isfinite(series.value) and not series.nonfinite_ok
            note, key = _unjudged(series, at)
            yield replace(
                row,
                value=series.value,
                score=series.score,
                normal=series.normal,
                progress=progress(series, batch.now),
                note=note or ("non-finite" if nonfinite else ""),
                key=key,
            )


def _add_silence(rows: list[TraceRow], row: TraceRow) -> None:
    """The watchdog looks many times within one step: keep the changes, and the last look before each."""
    last = rows[-1] if rows else None
    if last is None or last.step != row.step or last.state is not row.state:
        rows.append(row)
    elif row.state is not State.FIRING:
        rows[-1] = row


def _unjudged(series: SeriesState, step: int) -> tuple[str, str]:
    """Why a sample that came could not make the rule fire, and the key of the rule that says so; both empty if it could."""
    if series.state is not State.WARMING:
        return "", ""
    cause = series.cause
    need = max(cause.min_samples, cause.condition.min_samples)
    if series.score is None or series.n < cause.min_samples:
        return f"needs {need} samples, has {series.n}", "min_samples"
    if cause.warmup.unit == "steps":
        return (f"warm-up until step {series.warm_until}" if step <= series.warm_until else ""), "warmup"
    return f"warm-up of {cause.warmup}", "warmup"


def progress(series: SeriesState, now: float) -> str:
    """How far a series is on its way into or out of an episode; empty when it is not under way."""
    hold = series.cause.hold
    if series.state is State.PENDING:
        if hold.seconds:
            return f"{now - (series.since if series.since is not None else now):.3g} s of {hold.seconds:g} s"
        if series.recent is not None:
            return f"{series.hits} of {hold.need} in {hold.of}"
        return f"{series.streak} of {hold.need}"
    if series.state is State.FIRING:
        if hold.seconds:
            return (
                f"clearing {now - series.clear_since:.3g} s of {hold.seconds:g} s"
                if series.clear_since is not None
                else ""
            )
        return f"clearing {series.clear_streak} of {hold.need}" if series.clear_streak else ""
    return ""


def _worst(listed: list[list[TraceRow]], around: int, breaches: Comparator) -> list[TraceRow]:
    """The rows of the series that stood worst at a step, or anywhere if it has no row there."""

    def compare(one: list[TraceRow], other: list[TraceRow]) -> int:
        mine, its = _standing(one, around, breaches), _standing(other, around, breaches)
        if mine[0] != its[0]:
            return 1 if mine[0] > its[0] else -1
        if mine[1] is not None and its[1] is not None:
            nearer = breaches.closer(mine[1], its[1]) - breaches.closer(its[1], mine[1])
            if nearer:
                return nearer
        return any(r.value is not None for r in one) - any(r.value is not None for r in other)

    return max(listed, key=cmp_to_key(compare), default=[])


def _standing(rows: list[TraceRow], around: int, breaches: Comparator) -> tuple[tuple[bool, bool, bool], float | None]:
    """Whether a series fires, breaches by what is no number, was scored at all; and its score nearest to a breach."""
    here = [row for row in rows if row.step == around] or rows
    nearest = max((row.score for row in here if row.score is not None), key=closeness(breaches), default=None)
    fires = any(row.state is State.FIRING for row in here)
    no_number = any(row.value is not None and not math.isfinite(row.value) for row in here)
    return (fires, no_number, nearest is not None), nearest
