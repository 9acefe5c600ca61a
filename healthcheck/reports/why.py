"""Why an alert fired, recomputed from the record by the real engine, and what else changed around it: facts, no culprits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from healthcheck.core.alerts import State
from healthcheck.core.protocols import Comparator
from healthcheck.core.samples import CONTEXT_LABELS, series_name
from healthcheck.core.text import decode_number, number, plural, step
from healthcheck.engine.columns import Moment
from healthcheck.engine.trace import TraceRow, judgements
from healthcheck.record.lines import Batch as RecordedBatch
from healthcheck.record.runs import Run
from healthcheck.reports.alertblock import asks, headings
from healthcheck.reports.alertcharts import around, pictures_of
from healthcheck.reports.charts import Picture
from healthcheck.reports.recorded import Recorded
from healthcheck.reports.wording import cause_name
from healthcheck.rulelang.comparators import closeness
from healthcheck.rulelang.rule import Cause, RuleSet

BEFORE = 20
"""Samples of the recent past."""
BEFORE_DRAWN, AFTER_DRAWN = 150, 40
"""Steps before an alert and after its end that are drawn."""
LOOK_BACK = 3
"""Steps before the first breach that are searched for a change."""
ALWAYS = ("lr",)
"""Metrics of which a word is said in any case: that they did not change is worth knowing as well."""


@dataclass(slots=True)
class Change:
    """One series that left its range near the alert."""

    series: str
    step: int
    usual: float
    value: float
    strength: float

    metric: str

    def text(self, first_step: int, unit: str = "") -> str:
        """``grad_norm 0.9 -> 14.2 one step earlier``."""
        values = f"{number(self.usual, unit)} -> {number(self.value, unit)}"
        return f"{self.series} {values} {_when(self.step - first_step)}"


@dataclass(slots=True)
class Course:
    """What a series of ``ALWAYS`` did over the steps up to the alert, where none of its values stands out."""

    series: str
    first_step: int
    first: float
    last_step: int
    last: float
    lowest: float
    highest: float

    @property
    def unchanged(self) -> bool:
        """Whether every recorded value of these steps is the same number."""
        return self.lowest == self.highest

    def text(self, unit: str = "") -> str:
        """``lr unchanged at 0.01 since step 4`` or ``lr 0.0001 -> 0.0003 from step 4 to 24``."""
        if self.unchanged:
            return f"{self.series} unchanged at {number(self.last, unit)} since step {step(self.first_step)}"
        ends = f"{self.series} {number(self.first, unit)} -> {number(self.last, unit)}"
        turns = (self.lowest, self.highest) != (min(self.first, self.last), max(self.first, self.last))
        between = f", between {number(self.lowest, unit)} and {number(self.highest, unit)}" if turns else ""
        return f"{ends} from step {step(self.first_step)} to {step(self.last_step)}{between}"


def _when(offset: int) -> str:
    if offset == 0:
        return "at the same step"
    amount = "one step" if abs(offset) == 1 else plural(abs(offset), "step")
    return f"{amount} {'earlier' if offset < 0 else 'later'}"


def changes_around(
    batches: Iterable[RecordedBatch], first_step: int, fired_step: int, *, leave_out: str, most: int = 4
) -> tuple[list[Change], list[Course]]:
    """The strongest changes of other series, and the course of those of ``ALWAYS`` that are not among them.

    :param first_step: step of the first breaching sample.
    :param leave_out: the alert's own series.

    Families (per parameter) are left out: their worst members stand in the alert.
    """
    series: dict[str, list[tuple[int, float]]] = {}
    for batch in batches:
        if batch.at > fired_step + 1:
            break
        for sample in batch.samples:
            if all(name in CONTEXT_LABELS for name, _ in sample.labels):
                series.setdefault(series_name(sample.metric, sample.labels), []).append((sample.step, sample.value))
    changes, courses = [], []
    for name, values in series.items():
        if name == leave_out:
            continue
        change = _change(name, values, first_step, fired_step)
        if change is not None:
            changes.append(change)
        if name in ALWAYS and (course := _course(name, values, first_step, fired_step)) is not None:
            courses.append(course)
    changes.sort(key=lambda c: (-c.strength, c.series))
    shown = {change.series for change in changes[:most]}
    return changes[:most], [course for course in courses if course.series not in shown]


def _course(name: str, values: list[tuple[int, float]], first_step: int, fired_step: int) -> Course | None:
    """What the record holds of the steps up to the alert; None if that is less than one value before it and one at it."""
    before = [pair for pair in values if pair[0] < first_step][-BEFORE:]
    here = [pair for pair in values if first_step <= pair[0] <= fired_step]
    if not before or not here or not all(math.isfinite(value) for _, value in [*before, *here]):
        return None
    near = [*before, *here]
    seen = [value for _, value in near]
    return Course(name, near[0][0], seen[0], near[-1][0], seen[-1], min(seen), max(seen))


def _change(name: str, values: list[tuple[int, float]], first_step: int, fired_step: int) -> Change | None:
    past = [v for at, v in values if at < first_step - LOOK_BACK and math.isfinite(v)][-BEFORE:]
    if len(past) < 5:
        return None
    usual = median(past)
    spread = 1.4826 * median(abs(v - usual) for v in past)
    limit = max(8 * spread, 0.2 * abs(usual), 1e-12)
    for at, value in values:
        if not first_step - LOOK_BACK <= at <= fired_step:
            continue
        if not math.isfinite(value):
            return Change(name, at, usual, value, math.inf, name.partition("[")[0])
        if abs(value - usual) > limit:
            strength = abs(value - usual) / max(spread, 0.01 * abs(usual), 1e-12)
            return Change(name, at, usual, value, strength, name.partition("[")[0])
    return None


# --------------------------------------------------------------------------------------------------
# The reasons of one alert, as data: trace, surroundings, other alerts, closest approach before.


NEAR = 5
"""Steps within which another alert is named."""


@dataclass(slots=True)
class Explanation:
    """Everything that ``healthcheck why`` says of one alert."""

    run: Run
    alert: dict[str, Any]
    """As in ``report.json``."""
    rule: Cause | None
    asks: str
    origin: str
    before: list[TraceRow] = field(default_factory=list)
    """The last judgements before the episode."""
    episode: list[TraceRow] = field(default_factory=list)
    """From the first breach to the clearing."""
    closest: TraceRow | None = None
    """The judgement before this episode that came nearest to firing."""
    changes: list[Change] = field(default_factory=list)
    courses: list[Course] = field(default_factory=list)
    also: list[dict[str, Any]] = field(default_factory=list)
    """Other alerts near this one, or explained by it."""
    problem: str = ""
    """Why there is no trace, or why it may differ from what the run saw."""
    pictures: list[Picture] = field(default_factory=list)
    """Its series near the alert, with the limit and what was normal; then its score, where that has the limit."""

    @property
    def headings(self) -> tuple[str, str]:
        return headings(self.rule)

    @property
    def first_step(self) -> int:
        """Step of the first breaching sample."""
        return self.episode[0].step if self.episode else int(self.alert["fired_step"])

    def to_json(self) -> dict[str, Any]:
        return {
            "run": self.run.name,
            "folder": str(self.run.folder),
            "alert": self.alert,
            "asks": self.asks,
            "origin": self.origin,
            "trace": [_row_json(row) for row in [*self.before, *self.episode]],
            "closest_before": _row_json(self.closest) if self.closest is not None else None,
            "around": [{"series": c.series, "step": c.step, "usual": c.usual, "value": c.value} for c in self.changes],
            "unchanged": [course.series for course in self.courses if course.unchanged],
            "also": [{"number": a["number"], "rule": a["rule"], "fired_step": a["fired_step"]} for a in self.also],
            "problem": self.problem,
        }


def _row_json(row: TraceRow) -> dict[str, Any]:
    return {
        "step": row.step,
        "series": row.series,
        "value": row.value,
        "normal": row.normal,
        "score": row.score,
        "state": str(row.state),
        "fired": row.fired,
        "cleared": row.cleared,
    }


def explain_alert(run: Run, alert: dict[str, Any], rules: RuleSet | None, problem: str) -> Explanation:
    """Recompute what the rule saw around one alert of a recorded run.

    :param rules: the rules that judged the run; None if they cannot be compiled here.
    :param problem: why not.
    """
    rule = next((r for r in rules.causes if r.id == cause_name(alert)), None) if rules is not None else None
    entry = (run.report or {}).get("rules", {}).get(alert["rule"], {})
    found = Explanation(
        run,
        alert,
        rule,
        asks(rule) if rule is not None else str(alert.get("threshold", "")),
        str(entry.get("origin") or (rule.origin if rule is not None else "")),
        problem=problem,
    )
    found.also = _also(run.alerts, alert)
    samples = run.samples
    if rules is not None and rule is not None and samples.batches:
        start = int(run.facts.get("resumed_from") or 0)
        rank = int(run.facts.get("rank") or 0)
        rows = list(
            judgements(rules, rule.id, _looked_at(samples.batches, rule), start_step=start, rank=rank, bounds=True)
        )
        series = alert["series"][0]["name"] if alert.get("series") else str(rule.selector)
        found.episode, earlier = episode_rows(rows, series, int(alert.get("cause_step", alert["fired_step"])))
        found.pictures = [
            around(alert, picture, before=BEFORE_DRAWN, after=AFTER_DRAWN, most=BEFORE_DRAWN)
            for picture in pictures_of(alert, Recorded(), rows, rule)
        ]
        if found.episode:
            found.before = earlier[-2:]
            found.closest = _closest(earlier, rule.condition.breaches)
        if not samples.complete:
            lost = f"{plural(samples.gaps, 'evaluation')} could not be written in time" if samples.gaps else ""
            thin = f"steps up to {step(samples.thinned_to)} were thinned" if samples.thinned_to else ""
            found.problem = f"{' and '.join(filter(None, (thin, lost)))}: scores may differ from what the run saw"
        elif not found.episode and not rule.condition.absence:
            found.problem = _not_again(run, rule.id, rows)
    elif not samples.batches and not problem:
        found.problem = "the record holds no samples"
    if samples.batches:
        name = alert["series"][0]["name"] if alert.get("series") else ""
        found.changes, found.courses = changes_around(
            samples.batches, found.first_step, int(alert["fired_step"]), leave_out=name
        )
        # Where values were left out of the record, nobody knows that nothing changed.
        whole = [course for course in found.courses if course.first_step > samples.thinned_to]
        found.courses = [] if samples.gaps else whole
    return found


def _not_again(run: Run, rule: str, rows: Sequence[TraceRow]) -> str:
    """What judging the record once more gave instead of the alert."""
    instead = sorted({row.step for row in rows if row.fired})
    steps = ", ".join(map(step, instead[:3])) + (" ..." if len(instead) > 3 else "")
    what = f"at step {steps} instead" if instead else "not at all"
    why = (
        "; the run went on from a checkpoint with what its rules had seen before"
        if run.facts.get("resumed_from")
        else ""
    )
    return f"judged again from the record alone, {rule} fires {what}{why}; the numbers below are the run's own"


def _also(alerts: Sequence[dict[str, Any]], alert: dict[str, Any]) -> list[dict[str, Any]]:
    """Alerts that this one explains or that explain it first, then those within a few steps."""
    here = int(alert["fired_step"])

    def related(other: dict[str, Any]) -> bool:
        return bool(alert["rule"] == other.get("explained_by") or other["rule"] == alert.get("explained_by"))

    near = [a for a in alerts if a["number"] != alert["number"] and abs(int(a["fired_step"]) - here) <= NEAR]
    return sorted(near, key=lambda a: (not related(a), abs(int(a["fired_step"]) - here)))


def _closest(rows: Sequence[TraceRow], breaches: Comparator) -> TraceRow | None:
    scored = [(row.score, row) for row in rows if row.score is not None and math.isfinite(row.score)]
    nearest = closeness(breaches)
    return max(scored, key=lambda pair: nearest(pair[0]), default=(None, None))[1]


def own_numbers(alert: dict[str, Any]) -> tuple[float, float | None, float | None]:
    """(value, normal, score) of an alert as recorded."""

    def decoded(name: str) -> float | None:
        return decode_number(alert[name]) if alert.get(name) is not None else None

    return decode_number(alert["value"]), decoded("normal"), decoded("score")


def _looked_at(batches: Iterable[RecordedBatch], rule: Cause) -> Iterator[Moment]:
    """The evaluations of a record, with the watchdog's looks where a rule needs them."""
    previous: float | None = None
    for batch in batches:
        if rule.condition.absence == "seconds" and previous is not None:
            yield Moment(batch.at, (), batch.now, batch.now - previous)
        previous = batch.now
        yield Moment(batch.at, batch.samples, batch.now)


def episode_rows(rows: Sequence[TraceRow], series: str, fired_step: int) -> tuple[list[TraceRow], list[TraceRow]]:
    """The rows of one series from the first breach before ``fired_step`` to the clearing, and all rows before."""
    own = [row for row in rows if row.series == series and (row.value is not None or row.silent)]
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
