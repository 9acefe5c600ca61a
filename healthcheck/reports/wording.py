"""What alerts, verdicts and the end of a run read like, for every output that shows them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.core.alerts import OBSERVE_MODE, Severity
from healthcheck.core.text import duration, plural, shorten, step
from healthcheck.rulelang.rule import Rule
from healthcheck.rulelang.sources import is_pack_name
from healthcheck.run.budget import NOTICED

PAST = {
    "stop": "stopped",
    "skip_update": "skipped the update",
    "cleanup": "cleaned up memory",
    "checkpoint": "saved a checkpoint",
    "scale_lr": "scaled the learning rate",
    "warn": "warned",
    "note": "noted",
    "evidence": "kept evidence",
}
"""Action -> what it did, for outcomes without a text of their own."""


def excused(alert: Mapping[str, Any]) -> bool:
    """Whether an alert does not count: muted, or accepted as known."""
    return bool(alert.get("muted") or alert.get("accepted"))


def fails_from(report: Mapping[str, Any]) -> float:
    """The severity from which alerts of this run fail it; infinite for ``never``."""
    fail_on = str(report.get("fail_on", "error"))
    return float("inf") if fail_on == "never" else Severity.parse(fail_on)


def place(origin: str) -> tuple[str, int]:
    """``team.yaml:14`` -> ``("team.yaml", 14)``; a pack, which is no file here, has no place: ``("", 0)``."""
    file, _, line = origin.rpartition(":")
    if not (file and line.isdigit()):
        file, line = origin, "0"
    return ("", 0) if is_pack_name(file) else (file, int(line))


def headline(alert: Mapping[str, Any]) -> str:
    """``loss-not-finite at step 131: loss is nan``."""
    return f"{alert['rule']} at step {alert['fired_step']:,}: {alert.get('message', '')}"


def story(alert: Mapping[str, Any]) -> str:
    """All that a person needs of one alert, as text."""
    lines = [f"{alert['severity']}: {headline(alert)}", f"  value: {alert['value']}, limit: {alert['threshold']}"]
    if "normal" in alert:
        lines[-1] += f", normal: {alert['normal']}"
    lines += [f"  {key.replace('_', ' ')}: {value}" for key, value in alert.get("facts", {}).items()]
    lines += [f"  {_done(o)}" for o in alert.get("actions", ()) if o.get("text")]
    if alert.get("explained_by"):
        lines.append(f"  explained by {alert['explained_by']}")
    lines += [f"  {word}: {alert[word]}" for word in ("muted", "accepted") if alert.get(word)]
    if alert.get("hint"):
        lines.append(f"  try: {alert['hint']}")
    return "\n".join(lines)


def _done(outcome: Mapping[str, Any]) -> str:
    action, text = str(outcome["action"]), str(outcome["text"])
    return text if text.startswith(action) else f"{action}: {text}"


def by_severity(alerts: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Most severe first, then in the order in which they fired."""
    return sorted(alerts, key=lambda a: -Severity.parse(a["severity"]))


def actions_done(alert: Mapping[str, Any]) -> str:
    """``warned; would have cleaned up memory and stopped (observe)``."""
    texts = []
    held: dict[str, list[str]] = {}
    for outcome in alert.get("actions", ()):
        name = str(outcome["action"])
        past = PAST.get(name, f"ran {name}")
        if outcome.get("held"):
            reason = "observe" if outcome["text"] == OBSERVE_MODE else str(outcome["text"])
            held.setdefault(reason, []).append(past)
        elif name == "evidence" and outcome["done"]:
            texts.append(past)
        else:
            texts.append(str(outcome["text"] or past))
    texts += [f"would have {' and '.join(done)} ({reason})" for reason, done in held.items()]
    return "; ".join(texts) or "reported"


# --------------------------------------------------------------------------------------------------
# The closing block: how the run ended and why, what was not judged, where the record is.


_GROUPS = (
    (re.compile(r"^(needs \d+ samples|still warming up|first due at)"), "run too short"),
    (re.compile(r"^(no sample of|nothing logged)"), "metric not seen"),
    (re.compile(r"^the record has no "), "not in the record"),
)
"""Reasons with a number or a name in them -> the words that stand for all of their kind."""

RIGHT = 88
"""Column at which the closing line's exit code stands, where the text before it is shorter."""


def closing_line(report: Mapping[str, Any]) -> str:
    """The line that scripts grep: verdict, reason in words, exit code."""
    return with_exit(f"healthcheck: {how_it_ended(report)}", int(report["exit_code"]))


def with_exit(text: str, code: int) -> str:
    """A closing line: what happened on the left, ``exit n`` on the right."""
    return f"{text.ljust(RIGHT)}exit {code}" if len(text) < RIGHT - 1 else f"{text}  exit {code}"


def how_it_ended(report: Mapping[str, Any]) -> str:
    """``STOPPED at step 131 by loss-not-finite``, ``OK, 1,560 steps in 3 m 12 s``."""
    reason, words = report["exit_reason"], report["exit_words"]
    unit = str(report.get("unit", "step"))
    amount = plural(int(report["steps"]), unit)
    took = duration(float(report["seconds"]))
    stop = report.get("stop") or {}
    asked = bool(stop) and not stop.get("rule")
    length = f"stopped as asked after {amount}, {took}" if asked else f"{amount} in {took}"
    if reason == "stop":
        return f"STOPPED at step {step(int(stop['step']))} by {stop['rule']}"
    if reason == "alert":
        return f"FAILED, {words}, {length}"
    if reason == "script_error":
        return f"SCRIPT FAILED, {words} after {amount}"
    if reason == "interrupted":
        return f"INTERRUPTED, {words} after {amount}"
    if reason == "monitor_error":
        return f"INTERNAL ERROR, {words}, {length}"
    if reason == "nothing_judged":
        return f"NOT JUDGED, {words}, {length}"
    why = f" ({words})" if words not in ("ok", "") else ""
    fraction = report.get("overhead", {}).get("fraction")
    # Of a run of a second, start-up is most of it: a share would say nothing. Nor would it where steps are so short that
    # the allowance of every run is a large part of them all.
    steps = int(report["steps"])
    worth_saying = fraction is not None and steps and float(report["seconds"]) >= max(1.0, NOTICED * steps)
    cost = f", cost {float(fraction) * 100:.1f} % of the time" if worth_saying else ""
    device = report.get("overhead", {}).get("device_seconds_per_step")
    if cost and device is not None:
        cost += f" and {float(device) * 1e6:,.0f} us of the device a step"
    return f"OK{why}, {length}{cost}"


def closing_block(report: Mapping[str, Any], record: str = "", *, named: str = "", details: bool = False) -> list[str]:
    """All lines of the closing block.

    :param record: path of the run's folder as shown to the user; empty without one.
    :param named: how the commands name this run; empty where ``latest`` is it.
    :param details: name every rule that was not judged (``-v``).
    """
    lines = [closing_line(report)]
    lines += [f"  {text}" for text in (count_line(report["rules"]), _alerts_line(report), *_warnings(report)) if text]
    if details and report["steps"]:  # without a step all of them say the same
        lines += [
            f"  not judged  {rule}: {entry.get('reason', '')}"
            for rule, entry in report["rules"].items()
            if entry["verdict"] == "not judged"
        ]
    normal = f"normal for this run: healthcheck metrics {named or 'latest'}"
    if record:
        has_alerts = bool(report["alerts"])
        left = f"why: healthcheck why {named}".rstrip() if has_alerts else normal if report["steps"] else ""
        lines.append("  " + (f"{left}        record: {record}" if left else f"record: {record}"))
    known = list(report.get("accepted_unused", ()))
    if known:
        lines.append(f"accepted, but nothing needed it: {shorten(known)} (healthcheck-accepted.yaml)")
    return lines


def count_line(rules: Mapping[str, Mapping[str, Any]]) -> str:
    """``failed 1, ok 17, not judged 7 (no GPU: 4, run too short: 2, ...)``."""
    counts = Counter(str(entry["verdict"]) for entry in rules.values())
    parts = [f"{name} {counts[name]}" for name in ("failed", "warned") if counts[name]]
    parts.append(f"ok {counts['ok']}")
    if counts["not judged"]:
        silent = [entry for entry in rules.values() if entry["verdict"] == "not judged"]
        parts.append(f"not judged {counts['not judged']} ({grouped_reasons(silent)})")
    return ", ".join(parts)


def grouped_reasons(entries: Iterable[Mapping[str, Any]], most: int = 4) -> str:
    """``no GPU: 4, run too short: 2``, most frequent first."""
    reasons = Counter(short_reason(str(entry.get("reason") or "no reason known")) for entry in entries)
    common = reasons.most_common(most)
    text = ", ".join(f"{reason}: {count}" for reason, count in common)
    rest = sum(reasons.values()) - sum(count for _, count in common)
    return f"{text}, other reasons: {rest}" if rest else text


def short_reason(reason: str) -> str:
    """The group that a reason belongs to."""
    return next((words for pattern, words in _GROUPS if pattern.match(reason)), reason)


def _alerts_line(report: Mapping[str, Any]) -> str:
    """Alerts that had no block of their own, and what observe mode held back."""
    explained = [a for a in report["alerts"] if a.get("explained_by")]
    named: dict[str, Mapping[str, Any]] = {}
    for alert in explained:
        named.setdefault(str(alert["rule"]), alert)
    parts = []
    if named:
        texts = [
            f"{rule} at step {step(a['fired_step'])}, explained by {a['explained_by']}" for rule, a in named.items()
        ]
        parts.append("also: " + "; ".join(texts[:3]) + (f" and {len(texts) - 3} more rules" if len(texts) > 3 else ""))
    would = sum(map(would_have_stopped, report["alerts"]))
    if would:
        parts.append(f"would have stopped {plural(would, 'time')} (observe mode)")
    muted = [str(a["rule"]) for a in report["alerts"] if a.get("muted") or a.get("accepted")]
    if muted:
        parts.append(f"muted or accepted: {shorten(list(dict.fromkeys(muted)))}")
    return "; ".join(parts)


def would_have_stopped(alert: Mapping[str, Any]) -> bool:
    """Whether only observe mode held back a stop; one that another alert explains is the same stop again."""
    return any(
        outcome["action"] == "stop" and bool(outcome.get("held")) and outcome["text"] == OBSERVE_MODE
        for outcome in alert.get("actions", ())
    )


def _warnings(report: Mapping[str, Any]) -> list[str]:
    """What went wrong with us, plugins and actions; required rules without data; mutes without effect."""
    lines = []
    stop = report.get("stop") or {}
    if stop.get("do_not_restart"):
        lines.append(
            f"stop {stop['times']} of this script by {stop['rule']} at this step: the data or the code, not luck; "
            "wrote DO-NOT-RESTART in the run folder"
        )
    good = report.get("last_good_checkpoint") or {}
    if good.get("needed"):
        lines.append(f"last checkpoint written while all was finite: step {step(good['step'])}, {good['path']}")
    required = [r for r, entry in report["rules"].items() if entry.get("required") and entry["verdict"] == "not judged"]
    if required:
        lines.append(f"required but not judged: {shorten(required)}")
    quarantined = sorted({str(e["plugin"]) for e in report.get("plugin_errors", ()) if e.get("quarantined")})
    failed = sorted({str(e["plugin"]) for e in report.get("plugin_errors", ())} - set(quarantined))
    if quarantined:
        lines.append(f"plugins switched off after errors: {shorten(quarantined)} (report.json: plugin_errors)")
    if failed:
        lines.append(f"plugins with errors: {shorten(failed)} (report.json: plugin_errors)")
    lines += [
        f"action {error['action']} failed for {error['rule']} at step {step(error['step'])}: {error['error']}"
        for error in list(report.get("action_errors", ()))[:2]
    ]
    unused = [m for m in report.get("mutes", ()) if not m.get("hits")]
    if unused:
        lines.append(f"mutes that matched nothing: {shorten([str(m['rule']) for m in unused])}")
    return lines


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


def asks(rule: Rule) -> str:
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
        parts.append(f"every {rule.every} steps")
    if rule.phase != "any":
        parts.append(f"in {rule.phase}")
    parts += [f"only if {guard.metric} {guard.test.text}" for guard in rule.only_if]
    return ", ".join(parts)


def headings(rule: Rule | None) -> tuple[str, str]:
    """What the columns of a trace are called: (normal, score)."""
    name = rule.condition.name if rule is not None else ""
    return _NORMAL.get(name, "normal"), _SCORE.get(name, "score")
