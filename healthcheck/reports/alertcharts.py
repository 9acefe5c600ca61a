"""The pictures of an alert: its own series, what was normal, and the limit that its rule drew, step by step.

The record keeps samples and rules. So the engine judges the samples once more, and the chart shows what it compared with
what: where a condition publishes the bound of its next value, that is the limit, exactly; where it has none, the score is
drawn in a second chart, with the limit of the score.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from healthcheck.core.text import decode_number, number, step
from healthcheck.engine.columns import Moment
from healthcheck.engine.trace import TraceRow, judgements
from healthcheck.reports.alertblock import headings
from healthcheck.reports.charts import Curve, Limit, Mark, Picture
from healthcheck.reports.recorded import Recorded, Series, plain_limit
from healthcheck.reports.wording import cause_name
from healthcheck.rulelang.rule import Cause, RuleSet

MOST = 12
"""Causes that are judged once more for the pictures of their alerts."""
LONG = 3_000
"""Steps of a run from which on the chart of an alert shows those around it, unless what it found is a trend."""
BEFORE, AFTER = 1_000, 500
"""Those steps: before the alert fired and after it cleared."""


def mark_of(alert: Mapping[str, Any]) -> Mark:
    """The alert in its own chart, from the step at which its cause fired."""
    at = int(alert.get("cause_step", alert["fired_step"]))
    cleared = alert.get("cleared_step")
    return Mark(at, int(cleared) if cleared is not None else None, f"fired at step {step(at)}", str(alert["severity"]))


def series_of(alert: Mapping[str, Any]) -> str:
    listed = alert.get("series") or ()
    return str(listed[0]["name"]) if listed else ""


def pictures_of(
    alert: Mapping[str, Any],
    record: Recorded,
    judged: Sequence[TraceRow] = (),
    cause: Cause | None = None,
    units: Mapping[str, str] | None = None,
) -> list[Picture]:
    """One chart of the alert's series, and one of its score where the limit is one of the score.

    :param judged: all rows of its cause; empty if its rules cannot be judged again.
    """
    name = series_of(alert)
    own = [row for row in judged if row.series == name and row.value is not None]
    known = record.series.get(name)
    unit = known.unit if known is not None else (units or {}).get(name.partition("[")[0], "")
    if len(own) >= 2 and any(row.fired for row in own):
        made = _from_rows(alert, name, unit, own, cause)
    elif known is not None and len(known.values):
        made = [_from_series(alert, known)]
    else:
        return []
    return [_near(alert, picture) for picture in made]


def _near(alert: Mapping[str, Any], picture: Picture) -> Picture:
    """The part of a long run in which an alert can be seen; a trend is the whole run."""
    first, last = picture.range
    if last - first <= LONG or alert.get("kind") == "trend":
        return picture
    return around(alert, picture, before=BEFORE, after=AFTER, most=LONG)


def around(alert: Mapping[str, Any], picture: Picture, *, before: int, after: int, most: int) -> Picture:
    """The steps from ``before`` an alert fired to ``after`` it cleared.

    :param most: steps of the time in which it fired that are shown.
    """
    first, last = picture.range
    at = int(alert.get("cause_step", alert["fired_step"]))
    ended = int(alert["cleared_step"]) if alert.get("cleared_step") is not None else at
    begin, end = max(first, at - before), min(last, max(at, min(ended, at + most)) + after)
    parts: list[Curve | Limit] = [*picture.curves, *picture.limits]
    for part in parts:
        if len(part.steps):
            since, until = bisect_left(part.steps, begin), bisect_right(part.steps, end)
            part.steps, part.values = part.steps[since:until], part.values[since:until]
    if picture.marks[0].last is not None and picture.marks[0].last > end:
        picture.marks = [replace(picture.marks[0], last=None)]
    picture.first, picture.last, picture.part = begin, end, True
    return picture


def _from_series(alert: Mapping[str, Any], known: Series) -> Picture:
    """From the samples and the alert's own numbers alone."""
    picture = Picture(known.name, [Curve(known.name, known.steps, known.values, smooth=True)], known.unit, tall=True)
    picture.marks = [mark_of(alert)]
    words = str(alert.get("threshold") or "")
    limit = plain_limit(words)
    value, score = alert.get("value"), alert.get("score")
    if limit is not None and score is not None and decode_number(score) == decode_number(value):
        picture.limits = [Limit("limit", limit[1], limit[0])]
    elif words:
        picture.level_words = words
    normal = alert.get("normal")
    if normal is not None and math.isfinite(decode_number(normal)) and known.steps:
        at = decode_number(normal)
        picture.curves.append(Curve("normal", [known.steps[0], known.steps[-1]], [at, at], "normal"))
    return picture


def _from_rows(
    alert: Mapping[str, Any], name: str, unit: str, rows: Sequence[TraceRow], cause: Cause | None
) -> list[Picture]:
    steps = [row.step for row in rows]
    values = [float(row.value) for row in rows if row.value is not None]
    picture = Picture(name, [Curve(name, steps, values, smooth=True)], unit, marks=[mark_of(alert)], tall=True)
    usual = [(row.step, row.normal) for row in rows if row.normal is not None and math.isfinite(row.normal)]
    normal_name, score_name = headings(cause)
    if usual:
        picture.curves.append(
            Curve(f"normal ({normal_name})", [at for at, _ in usual], [value for _, value in usual], "normal")
        )
    breaches = cause.condition.breaches if cause is not None else None
    if breaches is None or (cause is not None and cause.condition.judges_nonfinite):
        return [picture]
    picture.limits = _moving_limits(rows)
    if picture.limits:
        return [picture]
    levels = _levels(breaches)
    scored = [(row.step, row.score) for row in rows if row.score is not None]
    if all(row.score is None or row.score == row.value for row in rows):
        picture.limits = levels
        return [picture]
    if not scored or not levels:
        picture.level_words = str(alert.get("threshold") or breaches.text)
        return [picture]
    title = score_name if score_name != "score" else f"score of {cause.condition.name}" if cause else "score"
    score = Picture(title, [Curve(title, [at for at, _ in scored], [value for _, value in scored])], limits=levels)
    score.marks, score.first, score.last = picture.marks, *picture.range
    score.note = "what the rule compares with its limit"
    return [picture, score]


def _levels(breaches: Any) -> list[Limit]:
    """The limits of a score, as far as they are numbers."""
    low, high = getattr(breaches, "low", None), getattr(breaches, "high", None)
    if low is not None and low == high:
        return []
    made = [Limit("limit", 1, high)] if high is not None else []
    return made + ([Limit("limit", -1, low)] if low is not None else [])


def _moving_limits(rows: Sequence[TraceRow]) -> list[Limit]:
    """Between which values the rule would have been silent, step by step."""
    limits = []
    for side in (1, -1):
        pairs = [(row.step, row.bound.high if side > 0 else row.bound.low) for row in rows if row.bound is not None]
        pairs = [(at, value) for at, value in pairs if math.isfinite(value) and abs(value) < 1e300]
        if not pairs:
            continue
        if len({value for _, value in pairs}) == 1:
            limits.append(Limit("limit", side, pairs[0][1]))
        else:
            limits.append(Limit("limit", side, None, [at for at, _ in pairs], [value for _, value in pairs]))
    return limits


def judged_again(
    alerts: Iterable[Mapping[str, Any]],
    rules: RuleSet,
    moments: Sequence[Moment],
    *,
    start_step: int = 0,
    rank: int = 0,
) -> dict[int, tuple[list[TraceRow], Cause]]:
    """Number of an alert -> the rows of its cause over the whole run; alerts of one cause share them.

    :param rules: a set that judges nothing else: derived metrics keep their windows in it.
    """
    begin = [(formula, formula.state()) for formula in rules.derived]
    found: dict[int, tuple[list[TraceRow], Cause]] = {}
    known: dict[str, tuple[list[TraceRow], Cause]] = {}
    for alert in alerts:
        name = cause_name(alert)
        if name not in known:
            cause = next((cause for cause in rules.causes if cause.id == name), None)
            if cause is None or len(known) >= MOST or cause.condition.absence:
                continue
            for formula, state in begin:
                formula.restore(state)
            rows = list(judgements(rules, name, moments, start_step=start_step, rank=rank, bounds=True))
            known[name] = rows, cause
        found[int(alert["number"])] = known[name]
    return found


def compared(picture: Picture, alert: Mapping[str, Any]) -> str:
    """The alert in numbers: value, normal and limit."""
    value = f"value {number(decode_number(alert['value']), picture.unit)}" if alert.get("value") is not None else ""
    normal = f"normal {number(decode_number(alert['normal']), picture.unit)}" if alert.get("normal") is not None else ""
    return ", ".join(filter(None, (value, normal)))
