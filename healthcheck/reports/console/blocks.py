"""The block of one alert: at most five lines, always in the same order.

What, where and what is normal; what else was seen; what we did; where the evidence lies; what to try.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from healthcheck.reports.alerttext import PAST
from healthcheck.reports.text import mentions, number, plural, shorten, step
from healthcheck.verdicts import ActionOutcome, Alert, Severity

LABEL = {Severity.INFO: "INFO", Severity.WARNING: "WARN", Severity.ERROR: "ERROR"}
INDENT = " " * 6
MOST_LINES = 5

_SILENT = {"note", "warn", "evidence"}
"""Actions with a line of their own, or whose work is the block itself."""

History = Callable[[str, int], list[tuple[int, float]]]


def alert_block(
    alert: Alert,
    explained: Sequence[Alert],
    history: History,
    *,
    world_size: int = 1,
    place: Callable[[str], str] = str,
    named: str = "",
    again: bool = False,
) -> list[str]:
    """The lines of one alert; the first is not indented.

    :param explained: alerts that this one explains; their facts are told here.
    :param history: ``history(series, n)``, for the value before a non-finite one.
    :param place: how a path is shown.
    :param named: how the commands name this run; empty where ``latest`` is it.
    :param again: the rule fired before and that was over by itself: then its known false alarms are pointed at.
    """
    evidence = evidence_path(alert)
    rest = (
        _seen(alert, explained),
        _done(alert),
        f"evidence: {place(evidence)}" if evidence else "",
        _advice(alert, named, again),
    )
    lines = [_headline(alert, history, world_size), *(INDENT + text for text in rest if text)]
    return lines[:MOST_LINES]


def only_noted(alert: Alert) -> bool:
    """Whether its rule asks to keep the alert for the end instead of saying it now (``then: [note]``)."""
    return bool(alert.actions) and all(outcome.action == "note" for outcome in alert.actions)


def _headline(alert: Alert, history: History, world_size: int) -> str:
    message = alert.message or f"{alert.series[0].name if alert.series else alert.rule} is {number(alert.value)}"
    extra = []
    if not _told(message, alert.value):
        extra.append(f"value {number(alert.value)}")
    before = _before(alert, history)
    if before:
        extra.append(before)
    elif alert.normal is not None and math.isfinite(alert.normal) and not _told(message, alert.normal):
        extra.append(f"normal {number(alert.normal)}")
    if math.isfinite(alert.value) and alert.threshold and not mentions(message, alert.threshold):
        scored = alert.score is not None and alert.score != alert.value and not _told(message, alert.score)
        extra.append((f"score {number(alert.score)}, " if scored else "") + f"limit {alert.threshold}")
    if world_size > 1:
        extra.append(f"on rank {alert.rank}")
    tail = f" ({', '.join(extra)})" if extra else ""
    return f"{LABEL[alert.severity]} {alert.rule}  step {step(alert.fired_step)}   {message}{tail}"


def _told(message: str, value: float | None) -> bool:
    """Whether a message says this number already, in whatever precision."""
    if value is None:
        return True
    forms = {number(value)} | {format(value, spec) for spec in ("g", ".4g", ".3g", ".2g", ".1f", ".2f", ".3f")}
    if math.isfinite(value) and 0 < abs(value) < 1:
        forms |= {f"{value:.0%}", f"{value:.1%}"}
    return any(mentions(message, form) for form in forms)


def _before(alert: Alert, history: History) -> str:
    """``2.31 one step earlier``: what is normal, where only the value before can say it."""
    if math.isfinite(alert.value) or not alert.series:
        return ""
    for at, value in reversed(history(alert.series[0].name, 50)):
        if at < alert.fired_step and math.isfinite(value):
            gap = alert.fired_step - at
            return f"{number(value)} {'one step' if gap == 1 else plural(gap, 'step')} earlier"
    return ""


def _seen(alert: Alert, explained: Sequence[Alert]) -> str:
    """Facts of this alert and of those it explains; seen, never guessed."""
    parts: list[str] = []
    for source in (alert, *explained):
        parts += [text for text in facts_text(source) if text not in parts]
    if alert.count > 1:
        names = shorten([fact.name for fact in alert.series], 3)
        parts.append(f"{alert.count:,} series: {names}" if alert.count > 3 else f"in {names}")
    if alert.detected_step > alert.fired_step:
        parts.append(f"seen at step {step(alert.detected_step)}")
    return "; ".join(parts)


def facts_text(alert: Alert) -> list[str]:
    """``first bad gradient: head.scale, 1 of 64 values``, ``weights: finite``, one per fact."""
    facts = {key: value for key, value in alert.facts.items() if value not in ("", None)}
    parts = []
    first = facts.pop("first", None)
    tensors = facts.pop("tensors", None)
    if first is not None:
        what = str(tensors or "")
        name = "gradient" if "gradient" in what else "tensor" if "tensor" in what else "place"
        parts.append(f"first bad {name}: {first}")
    if tensors is not None:
        parts.append(str(tensors))
    parts += [f"{key.replace('_', ' ')}: {_fact(value)}" for key, value in facts.items()]
    return parts


def _fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return number(value)
    if isinstance(value, (list, tuple)):
        return shorten([_fact(item) for item in value])
    return str(value)


def _done(alert: Alert) -> str:
    """What we did, what we would have done and why we did not."""
    said = [text for text in map(action_text, alert.actions) if text]
    if alert.muted:
        said.append(f"muted: {alert.muted}")
    if alert.accepted:
        said.append(f"accepted: {alert.accepted}")
    return "; ".join(dict.fromkeys(said)) or "only reported; training goes on"


def action_text(outcome: ActionOutcome) -> str:
    """One action as a sentence fragment; empty for those whose work is the block itself."""
    past = PAST.get(outcome.action, f"ran {outcome.action}")
    if outcome.held:
        if outcome.action in _SILENT:
            return ""
        reason = "observe" if outcome.text == "observe mode" else outcome.text
        return f"would have {past} ({reason})"
    if outcome.action in _SILENT:
        return "" if outcome.done or not outcome.text else f"{outcome.action}: {outcome.text}"
    if outcome.done:
        return outcome.text or past
    return outcome.text if "not " in outcome.text else f"{outcome.action}: {outcome.text}"


def evidence_path(alert: Alert) -> str:
    """Where the evidence of an alert lies, or an empty string."""
    for outcome in alert.actions:
        if outcome.action == "evidence" and outcome.done:
            return str(outcome.data.get("path") or outcome.text)
    return ""


def _advice(alert: Alert, named: str, again: bool) -> str:
    number_of = str(alert.number) if alert.number > 1 else ""
    more = " ".join(word for word in ("more: healthcheck why", named, number_of) if word)
    if again and alert.docs:
        more += f"        known false alarms: healthcheck explain {alert.rule}"
    return f"try: {alert.hint}        {more}" if alert.hint else more


def names_with_steps(alerts: Iterable[Alert]) -> list[str]:
    """``grads-not-finite at step 131``, repeated rules counted."""
    first: dict[str, Alert] = {}
    times: dict[str, int] = {}
    for alert in alerts:
        first.setdefault(alert.rule, alert)
        times[alert.rule] = times.get(alert.rule, 0) + 1
    return [
        f"{rule} at step {step(alert.fired_step)}" + (f" ({times[rule]} times)" if times[rule] > 1 else "")
        for rule, alert in first.items()
    ]
