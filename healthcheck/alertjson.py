"""Verdicts and alerts in the form of the report contract: strict JSON values only."""

from __future__ import annotations

from typing import Any

from healthcheck.samples import encode_number
from healthcheck.verdicts import ActionOutcome, Alert, Verdict


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "verdict": verdict.outcome.value,
        "severity": str(verdict.severity),
        "origin": verdict.origin,
        "episodes": verdict.episodes,
        "samples": verdict.samples,
        "threshold": verdict.threshold,
    }
    if verdict.reason:
        entry["reason"] = verdict.reason
    if verdict.required:
        entry["required"] = True
    if verdict.closest is not None:
        entry["closest"] = {"score": encode_number(verdict.closest), "step": verdict.closest_step}
    return entry


def alert_json(alert: Alert) -> dict[str, Any]:
    """One alert in the form of the report contract; what is absent is left out."""
    entry: dict[str, Any] = {
        "rule": alert.rule,
        "number": alert.number,
        "severity": str(alert.severity),
        "phase": alert.phase,
        "series": [
            {
                "name": f.name,
                "value": encode_number(f.value),
                "score": encode_number(f.score),
                "normal": encode_number(f.normal),
            }
            for f in alert.series
        ],
        "count": alert.count,
        "rank": alert.rank,
        "episode": alert.episode,
        "fired_step": alert.fired_step,
        "fired_sample": alert.fired_sample,
        "detected_step": alert.detected_step,
        "acted_step": alert.acted_step,
        "cleared_step": alert.cleared_step,
        "value": encode_number(alert.value),
        "score": encode_number(alert.score),
        "normal": encode_number(alert.normal),
        "threshold": alert.threshold,
        "message": alert.message,
        "hint": alert.hint or None,
        "docs": alert.docs or None,
        "tags": list(alert.tags),
        "explained_by": alert.explained_by or None,
        "muted": alert.muted or None,
        "accepted": alert.accepted or None,
        "time": round(alert.time, 3),
        "facts": {key: _plain(value) for key, value in alert.facts.items()},
        "actions": [_action_json(outcome) for outcome in alert.actions],
    }
    return {key: value for key, value in entry.items() if value is not None}


def _action_json(outcome: ActionOutcome) -> dict[str, Any]:
    entry = {"action": outcome.action, "done": outcome.done, "text": outcome.text, "step": outcome.step}
    if outcome.held:
        entry["held"] = True
    return {**entry, **{key: _plain(value) for key, value in outcome.data.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return encode_number(value)
    if isinstance(value, (str, int, bool)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)
