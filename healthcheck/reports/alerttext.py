"""One alert of ``report.json`` in words: what JUnit, GitHub, the page, ``why`` and ``report`` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from healthcheck.rulelang.packs import is_pack_name
from healthcheck.verdicts import Severity

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
            held.setdefault(str(outcome["text"]).removesuffix(" mode"), []).append(past)
        elif name == "evidence" and outcome["done"]:
            texts.append(past)
        else:
            texts.append(str(outcome["text"] or past))
    texts += [f"would have {' and '.join(done)} ({reason})" for reason, done in held.items()]
    return "; ".join(texts) or "reported"
