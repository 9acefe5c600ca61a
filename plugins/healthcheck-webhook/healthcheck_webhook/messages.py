"""Alerts as messages: plain values first, then the form that the other side takes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from healthcheck import Alert, Session

MARK = {"error": ":red_circle:", "warning": ":large_yellow_circle:", "info": ":white_circle:"}
LONGEST = 600
"""Characters of one text of an alert."""


def message(session: Session, alert: Alert) -> dict[str, Any]:
    """What is sent of an alert. Neither the command line nor paths nor the environment are in it."""
    return {
        "run": _short(session.info.target),
        "rule": alert.rule,
        "cause": alert.cause,
        "kind": str(alert.kind),
        "severity": str(alert.severity),
        "step": alert.fired_step,
        "rank": alert.rank,
        "ranks": session.info.world_size,
        "message": _short(alert.message),
        "hint": _short(alert.hint),
        "value": alert.value if math.isfinite(alert.value) else str(alert.value),
        "threshold": alert.threshold,
        "series": [fact.name for fact in alert.series],
        "where": alert.where,
        "done": [_short(outcome.text) for outcome in alert.actions if outcome.done and outcome.action != "warn"],
    }


def ending_content(session: Session, report: dict[str, Any]) -> dict[str, Any]:
    """A run that failed without an alert of this rank: what failed it is known to others, or it ended by an exception."""
    return {
        "run": _short(session.info.target),
        "rule": "run failed",
        "cause": "",
        "kind": "fact",
        "severity": "error",
        "step": report.get("steps", 0),
        "rank": session.info.rank,
        "ranks": session.info.world_size,
        "message": _short(str(report.get("exit_words") or report.get("exit_reason") or "the run failed")),
        "hint": "",
        "value": None,
        "threshold": "",
        "series": [],
        "where": "",
        "done": [],
    }


def json_body(messages: Sequence[dict[str, Any]]) -> bytes:
    """``{"format": "healthcheck.webhook", "version": 1, "alerts": [...]}``."""
    return _encoded({"format": "healthcheck.webhook", "version": 1, "alerts": list(messages)})


def slack_body(messages: Sequence[dict[str, Any]]) -> bytes:
    """``{"text": ...}``, as Slack, Mattermost, Rocket.Chat and Discord (with ``/slack`` behind its address) take it."""
    return _encoded({"text": "\n".join(_paragraph(one) for one in messages)})


def _paragraph(one: dict[str, Any]) -> str:
    name = f"{one['rule']}: {one['cause']}" if one["cause"] else one["rule"]
    rank = f", rank {one['rank']}" if one["ranks"] > 1 else ""
    where = f" ({_escaped(one['where'])})" if one["where"] else ""
    lines = [
        f"{MARK[one['severity']]} *{_escaped(name)}* in {_escaped(one['run'])}, step {one['step']}{rank}",
        f"{_escaped(one['message'])}{where}",
    ]
    lines += [f"done: {_escaped('; '.join(one['done']))}"] if one["done"] else []
    lines += [f"try: {_escaped(one['hint'])}"] if one["hint"] else []
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """The three characters that Slack reads as markup: a text of a record calls nobody (``<!channel>``)."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def _encoded(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=True, allow_nan=False).encode("ascii")
