"""The block of one alert: at most five lines, wrapped to the terminal, always in the same order.

What happened, with the number and what is normal; where; what we did; what to try. Nothing stands in it that would be the
same in every block: how to ask why is said once, at the end. At the end of this file: what its rule asks, in one line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from healthcheck.core.alerts import OBSERVE_MODE, ActionOutcome, Alert, Severity
from healthcheck.core.text import UNKNOWN_WIDTH, number, plural, shorten, step, wrapped
from healthcheck.reports.wording import PAST
from healthcheck.rulelang.rule import SETTLED, Cause
from healthcheck.run.judge import BLOCK_STEPS

LABEL = {Severity.INFO: "INFO", Severity.WARNING: "WARN", Severity.ERROR: "ERROR"}
INDENT = " " * 6
MOST_LINES = 5

_SILENT = {"note", "warn", "evidence", "ask_ranks"}
"""Actions with a line of their own, or whose work is the block itself."""

History = Callable[[str, int], list[tuple[int, float]]]


def alert_block(
    alert: Alert,
    explained: Sequence[Alert],
    history: History,
    *,
    score: str = "",
    width: int = UNKNOWN_WIDTH,
    world_size: int = 1,
) -> list[str]:
    """The lines of one alert; the first is not indented.

    :param explained: alerts that this one explains; their facts are shown here.
    :param history: ``history(series, n)``, for the value before a non-finite one.
    :param score: what the condition's score is called: ``z``, ``ratio``; empty where it is the value itself, or says nothing.
    :param width: columns of the terminal.
    """
    seen = "; ".join(text for text in (_where(alert, explained, world_size), _done(alert)) if text)
    rest = (seen, f"try: {alert.hint}" if alert.hint else "")
    parts = [wrapped(_headline(alert, history, score), width, INDENT, "")]
    return _five_lines([*parts, *(wrapped(text, width, INDENT) for text in rest if text)], width)


def _five_lines(parts: list[list[str]], width: int) -> list[str]:
    """The lines of all parts; where they are more than five, the longest part ends early and says so: the last of two."""
    while sum(map(len, parts)) > MOST_LINES:
        longest = max((part for part in reversed(parts[1:]) if len(part) > 1), key=len, default=parts[0])
        longest = parts[0] if len(parts[0]) > max(2, len(longest)) else longest
        longest.pop()
        kept = longest[-1].removesuffix(" ...")
        longest[-1] = (kept if len(kept) + 4 <= width else kept[: width - 4].rsplit(" ", 1)[0]) + " ..."
    return [line for part in parts for line in part]


def only_noted(alert: Alert) -> bool:
    """Whether its rule asks to keep the alert for the end instead of saying it now (``then: [note]``)."""
    return bool(alert.actions) and all(outcome.action == "note" for outcome in alert.actions)


def _headline(alert: Alert, history: History, score: str) -> str:
    message = alert.message or f"{alert.series[0].name if alert.series else alert.rule} is {number(alert.value)}"
    # What was judged, never the last sample in its place: a score over a window is shown alone, and a value beside its
    # score only where it is compared with something that is normal.
    compared = alert.normal is not None and math.isfinite(alert.normal)
    scored = alert.score is not None and alert.score != alert.value and math.isfinite(alert.value)
    extra = []
    flag = not compared and alert.value in (0, 1)  # a yes or no, which the message is about
    if (compared or not scored) and not flag and not _mentioned(message, alert.value):
        extra.append(number(alert.value))
    before = _before(alert, history)
    if before:
        extra.append(before)
    elif alert.normal is not None and compared and not _mentioned(message, alert.normal):
        extra.append(f"normal {number(alert.normal)}")
    if scored and score and not _mentioned(message, alert.score):
        extra.append(f"{score} {number(alert.score)}")
    tail = f" ({', '.join(extra)})" if extra else ""
    return f"{LABEL[alert.severity]} {alert.name}  step {step(alert.fired_step)}: {message}{tail}"


def mentions(text: str, what: str) -> bool:
    """Whether a number stands in a text as a word of its own: "2" does not stand in "loss is 20"."""
    return re.search(rf"(?<![\w.,]){re.escape(what)}(?![\w]|[.,]\d)", text) is not None


def _mentioned(message: str, value: float | None) -> bool:
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
            if _mentioned(alert.message, value):
                return ""
            gap = alert.fired_step - at
            return f"{number(value)} {'one step' if gap == 1 else plural(gap, 'step')} earlier"
    return ""


def _where(alert: Alert, explained: Sequence[Alert], world_size: int) -> str:
    """Which rank, series and part; facts of this alert and of those it explains. Seen, never guessed."""
    parts = [f"at {alert.where}"] if alert.where else []
    others = str(alert.facts.get("ranks") or "")
    if world_size > 1:
        # A comparison is judged on one rank and is about others.
        parts.append(f"on {'rank' if others.isdigit() or not others else 'ranks'} {others or alert.rank}")
    for source in (alert, *explained):
        parts += [text for text in facts_text(source) if text not in parts and text != f"ranks: {others}"]
    if alert.count > 1:
        names = shorten([fact.name for fact in alert.series], 3)
        parts.append(f"{alert.count:,} series: {names}" if alert.count > 3 else f"in {names}")
    elif alert.series and alert.series[0].labels and alert.series[0].name not in alert.message:
        parts.append(f"in {alert.series[0].name}")
    if alert.also:
        parts.append(f"also {', '.join(finding.cause for finding in alert.also)}")
    if alert.detected_step > alert.fired_step + BLOCK_STEPS:  # short steps are always judged together
        parts.append(f"seen at step {step(alert.detected_step)}")
    return "; ".join(parts)


def facts_text(alert: Alert) -> list[str]:
    """``first bad gradient: head.scale, 1 of 64 values``, ``weights: finite``, one per fact."""
    facts = {key: value for key, value in alert.facts.items() if value not in ("", None)}
    # What it came from comes first: the rest is what it has broken.
    parts = [f"{key}: {facts.pop(key)}" for key in ("cause", "input") if key in facts]
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
    return "; ".join(dict.fromkeys(said))


def action_text(outcome: ActionOutcome) -> str:
    """One action as a sentence fragment; empty for those whose work is the block itself."""
    past = PAST.get(outcome.action, f"ran {outcome.action}")
    if outcome.held:
        if outcome.action in _SILENT:
            return ""
        reason = "observe" if outcome.text == OBSERVE_MODE else outcome.text
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


# --------------------------------------------------------------------------------------------------
# A rule in one line, as a person asks it: ``robust_z(loss, window 200) above 8, in 2 samples running``.


_NORMAL = {"robust_z": "median", "zscore": "mean", "ratio": "baseline", "no_improvement": "best", "outlier": "siblings"}
_SCORE = {"robust_z": "z", "zscore": "z", "ratio": "ratio", "slope": "slope", "outlier": "ratio"}


_BY_VALUE = frozenset(
    {
        "threshold",
        "above",
        "below",
        "at_least",
        "at_most",
        "equals",
        "outside",
        "no_improvement",
        "unchanged",
    }
)
"""Conditions whose bound is a sentence about the metric itself."""


def asks(rule: Cause) -> str:
    """What must be true for this rule to fire, with the units of counting."""
    condition = rule.condition
    bound = condition.breaches.text
    name = condition.name
    if name in _BY_VALUE:
        text = f"{rule.selector} {bound}"
    elif name in ("missing", "stale"):
        text = f"no {rule.selector} for {bound}"
    elif condition.judges_nonfinite:
        text = f"{rule.selector} not finite"
    else:
        window = condition.window
        inner = f"{rule.selector}, window {window}" if window > 1 else str(rule.selector)
        text = f"{name}({inner}) {bound}"
    parts = [text]
    hold = rule.hold
    if hold.seconds:
        parts.append(f"for {hold.seconds:g} s")
    elif hold.of > 1:
        parts.append(
            f"in {hold.need} samples running" if hold.need == hold.of else f"in {hold.need} of {hold.of} samples"
        )
    if rule.warmup.amount:
        parts.append(f"after {rule.warmup}")
    if rule.every > 1:
        later = f" ({rule.settled_every} once {SETTLED} were made)" if rule.settled_every else ""
        parts.append(f"every {rule.every} steps{later}")
    if rule.phase != "any":
        parts.append(f"in {rule.phase}")
    parts += [f"only if {guard.metric} {guard.test.text}" for guard in rule.only_if]
    return ", ".join(parts)


def headings(rule: Cause | None) -> tuple[str, str]:
    """What the columns of a trace are called: (normal, score)."""
    name = rule.condition.name if rule is not None else ""
    return _NORMAL.get(name, "normal"), _SCORE.get(name, "score")


def score_name(cause: Cause) -> str:
    """What a person would call the score of its condition; empty where it says nothing or is the value itself."""
    name = cause.condition.name
    if name in _BY_VALUE or name in ("all", "any") or cause.condition.judges_nonfinite or cause.condition.absence:
        return ""
    return _SCORE.get(name, name.replace("_", " "))
