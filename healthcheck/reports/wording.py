"""What alerts, verdicts and the end of a run read like, for every output that shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from healthcheck.core.alerts import OBSERVE_MODE, Severity
from healthcheck.core.text import NARROWEST, UNKNOWN_WIDTH, duration, plural, shorten, step, wrapped
from healthcheck.rulelang.sources import is_pack_name
from healthcheck.run.budget import ALLOWANCE, NOTICED
from healthcheck.run.ending import warnings_of

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


def cause_name(alert: Mapping[str, Any]) -> str:
    """``rule.cause`` of the cause that speaks, or the rule where that is its own only cause."""
    return f"{alert['rule']}.{alert['cause']}" if alert.get("cause") else str(alert["rule"])


def by_cause(alert: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One alert as one for each cause that has found something; ``rule`` is ``rule.cause`` in them."""
    whole = {key: value for key, value in alert.items() if key != "also"}
    said = {
        **whole,
        "rule": cause_name(alert),
        "severity": alert.get("cause_severity", alert["severity"]),
        "fired_step": alert.get("cause_step", alert["fired_step"]),
    }
    bare = {key: value for key, value in whole.items() if key not in ("muted", "accepted", "hint", "facts", "normal")}
    return [
        said,
        *({**bare, **finding, "rule": f"{alert['rule']}.{finding['cause']}"} for finding in alert.get("also", ())),
    ]


def headline(alert: Mapping[str, Any]) -> str:
    """``loss-not-finite at step 131: loss is nan``."""
    return f"{alert['rule']} at step {alert['fired_step']:,}: {alert.get('message', '')}"


def story(alert: Mapping[str, Any]) -> str:
    """All that a person needs of one alert, as text."""
    lines = [f"{alert['severity']}: {headline(alert)}", f"  value: {alert['value']}, limit: {alert['threshold']}"]
    if "normal" in alert:
        lines[-1] += f", normal: {alert['normal']}"
    lines += [f"  {key.replace('_', ' ')}: {value}" for key, value in alert.get("facts", {}).items()]
    lines += [f"  also {other['cause']}: {other['message']}" for other in alert.get("also", ())]
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
# The closing block: how the run ended and why, what was judged, where the record is.


EXIT_COLUMN = 72
"""Where the closing line says ``exit n``: what stands there fits 80 columns."""


def verdict_word(report: Mapping[str, Any]) -> str:
    """The verdict as people read it everywhere: ``OK``, ``WARNED 2``, ``FAILED``, ``NOT JUDGED``, ..."""
    word = str(report["verdict"]).upper()
    return f"{word} {len(warnings_of(report)):,}" if word == "WARNED" else word


def closing_line(report: Mapping[str, Any]) -> str:
    """The whole ending in one line: verdict, reason in words, exit code."""
    return f"healthcheck: {how_it_ended(report)}  exit {report['exit_code']}"


def with_exit(text: str, code: int, width: int = UNKNOWN_WIDTH) -> list[str]:
    """A closing line: what happened on the left, ``exit n`` on the right; what does not fit goes on below it."""
    tail = f"exit {code}"
    first, *rest = wrapped(text, max(NARROWEST // 2, width - len(tail) - 2), "  ", "")
    column = max(len(first) + 2, min(EXIT_COLUMN, width - len(tail)))
    return [f"{first.ljust(column)}{tail}", *rest]


def how_it_ended(report: Mapping[str, Any]) -> str:
    """``STOPPED at step 131 by loss-not-finite``, ``OK, 1,560 steps in 3 m 12 s``."""
    verdict, words = str(report["verdict"]), str(report["exit_words"])
    unit = str(report.get("unit", "step"))
    amount = plural(int(report["steps"]), unit)
    stop = report.get("stop") or {}
    asked = bool(stop) and not stop.get("rule")
    took = f" in {duration(float(report['seconds']))}" if report["seconds"] else ""
    length = f"stopped as asked after {amount}{took.replace(' in ', ', ')}" if asked else f"{amount}{took}"
    word = verdict_word(report)
    if verdict == "stopped":
        return f"{word} {words}"
    if verdict in ("interrupted", "script failed"):
        return f"{word}, {words} after {amount}"
    if verdict == "not judged" and not report["steps"]:
        return f"{word}, {words}"
    if verdict not in ("ok", "warned"):
        return f"{word}, {words}, {length}"
    why = f" ({words})" if words else ""
    overhead = report.get("overhead", {})
    fraction = overhead.get("fraction")
    # Nobody minds the allowance of every run, which is most of what a short one paid, nor a share of steps that are hardly there.
    steps = int(report["steps"])
    long_enough = steps and float(report["seconds"]) >= NOTICED * steps
    worth_saying = fraction is not None and long_enough and float(overhead.get("host_seconds", 0.0)) >= ALLOWANCE
    cost = f", cost {float(fraction) * 100:.1f} % of the time" if worth_saying else ""
    return f"{word}{why}, {length}{cost}"


def closing_block(
    report: Mapping[str, Any], record: str = "", *, named: str = "", details: bool = False, width: int = UNKNOWN_WIDTH
) -> list[str]:
    """All lines of the closing block; of a run without an alert or a problem three at most.

    :param record: path of the run's folder as shown to the user; empty without one.
    :param named: how the commands name this run; empty where ``latest`` is it.
    :param details: name every check that was not judged (``-v``).
    :param width: columns of the terminal.
    """
    lines = with_exit(f"healthcheck: {how_it_ended(report)}", int(report["exit_code"]), width)
    judged = judged_line(report["rules"], width - 2, remedies=not report["alerts"])
    for text in (str(report.get("advice", "")) or judged, *_alerts_lines(report), *_warnings(report)):
        lines += wrapped(text, width, "    ", "  ")
    if details and report["steps"]:  # without a step all of them say the same
        for name, entry in unjudged(report["rules"]):
            remedy = f" ({entry['remedy']})" if entry.get("remedy") else ""
            lines += wrapped(f"not judged  {name}: {entry.get('reason', '')}{remedy}", width, "    ", "  ")
    if record:
        look = f"why: healthcheck why {named}".rstrip() if report["alerts"] else ""
        look = look or (f"numbers: healthcheck metrics {named or 'latest'}" if report["steps"] else "")
        both = "    ".join(text for text in (look, f"record: {record}") if text)
        lines += [f"  {both}"] if len(both) + 2 <= width else [f"  {t}" for t in (look, f"record: {record}") if t]
    known = list(report.get("accepted_unused", ()))
    if known:
        lines += wrapped(
            f"accepted, but nothing needed it: {shorten(known)} (healthcheck-accepted.yaml)", width, "    ", "  "
        )
    return lines


def checks(rules: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Everything that is judged on its own: the causes of each rule, or the rule itself, with their verdicts."""
    for rule, entry in rules.items():
        causes = entry.get("causes")
        if causes:
            yield from ((f"{rule}.{cause}", found) for cause, found in causes.items())
        else:
            yield rule, entry


def unjudged(rules: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Checks that apply to the run and were not judged."""
    return [(name, entry) for name, entry in checks(rules) if entry["verdict"] == "not judged"]


def judged_line(rules: Mapping[str, Mapping[str, Any]], width: int = 0, *, remedies: bool = True) -> str:
    """``58 of 66 checks that apply were judged; log eval.loss to judge over-fitting``.

    :param width: leave out remedies that make the line longer than this; 0: name all.
    :param remedies: say what can be done so that more is judged.
    """
    applying = [entry for _, entry in checks(rules) if entry["verdict"] != "does not apply"]
    if not applying:
        return "no check applies to this run" if rules else "there is nothing to judge: no rules"
    without = [entry for entry in applying if entry["verdict"] == "not judged"]
    if not without:
        return (
            f"all {plural(len(applying), 'check')} that apply were judged" if len(applying) > 1 else "1 check, judged"
        )
    text = f"{len(applying) - len(without)} of {plural(len(applying), 'check')} that apply were judged"
    known = _remedies(without) if remedies else []
    whole = "; ".join([text, *known])
    if not width or len(whole) <= width:
        return whole
    sign = ";"
    for remedy in known:  # without what each of them is good for
        short = remedy.partition(" to judge ")[0]
        if len(text) + 2 + len(short) <= width:
            text, sign = f"{text}{sign} {short}", ","
    return text


def _remedies(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """What can be done so that more is judged, what helps most checks first; of lengths of a run the longest."""
    count: Counter[str] = Counter()
    steps = 0
    for entry in entries:
        if entry.get("needs_steps"):
            steps = max(steps, int(entry["needs_steps"]))
        elif entry.get("remedy"):
            count[str(entry["remedy"])] += 1
    longer = [f"run at least {steps:,} steps"] if steps else []
    return [remedy for remedy, _ in count.most_common()] + longer


def _alerts_lines(report: Mapping[str, Any]) -> list[str]:
    """Alerts that had no block of their own, and what observe mode held back."""
    named: dict[str, Mapping[str, Any]] = {}
    for alert in report["alerts"]:
        if alert.get("explained_by"):
            named.setdefault(str(alert["rule"]), alert)
    lines = []
    if named:
        texts = [
            f"{rule} at step {step(a['fired_step'])}, explained by {a['explained_by']}" for rule, a in named.items()
        ]
        lines.append("also: " + "; ".join(texts[:3]) + (f" and {len(texts) - 3} more rules" if len(texts) > 3 else ""))
    would = sum(map(would_have_stopped, report["alerts"]))
    if would:
        lines.append(f"would have stopped {plural(would, 'time')} (observe mode)")
    muted = [str(a["rule"]) for a in report["alerts"] if excused(a)]
    if muted:
        lines.append(f"muted or accepted: {shorten(list(dict.fromkeys(muted)))}")
    return lines


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
    entries = report.get("plugin_errors", ())
    changing = sorted({str(e["plugin"]) for e in entries if e.get("raised") is False})
    failed = sorted({str(e["plugin"]) for e in entries if e.get("raised") is not False} - set(quarantined))
    if changing:
        lines.append(f"gradients were changed by: {shorten(changing)} (report.json: plugin_errors)")
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
