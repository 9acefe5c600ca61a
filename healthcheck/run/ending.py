"""How a run ended: its verdict, its exit code and the content of ``report.json``.

The report is a contract, described in docs/reference/report.md; every other output derives from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from healthcheck.core.alerts import Alert, Outcome, Severity, Verdict, alert_json
from healthcheck.core.protocols import Capabilities
from healthcheck.core.runinfo import Elsewhere
from healthcheck.core.text import encode_number, plural
from healthcheck.engine.engine import Engine
from healthcheck.extend.guard import describe
from healthcheck.rulelang.rule import RuleSet
from healthcheck.run.actor import StopRequest

REPORT_FORMAT = "healthcheck-report"
REPORT_VERSION = 1

OK, ALERTS, INTERRUPTED, INTERNAL, USAGE, NOTHING_JUDGED = range(6)
"""Exit codes."""

VERDICTS = (
    "ok",
    "warned",
    "failed",
    "stopped",
    "not judged",
    "interrupted",
    "script failed",
    "internal error",
)
"""How a run may end: ``verdict`` of ``report.json``, in capitals wherever people read it."""
VERDICTS_OF_THE_SCRIPT = ("interrupted", "script failed")
"""Those of a run whose code did not come to a good end, whatever was judged."""


class End(NamedTuple):
    """How a run ended."""

    code: int
    """Exit code."""
    verdict: str
    """One of :data:`VERDICTS`."""
    words: str
    """Why, as a sentence fragment; empty where the verdict says it all."""


@dataclass(slots=True)
class Ending:
    """How the watched code itself came to its end."""

    script_exit_code: int | None = None
    """The script's own ``sys.exit`` status; None in-process (``watch``)."""
    exception: BaseException | None = None
    interrupted: bool = False
    signal: int | None = None
    advice: str = ""
    """Why nothing of it may have been seen, and what helps; for a run in which nothing was judged."""
    children: Elsewhere = field(default_factory=Elsewhere)
    """What became of child processes that were watched as well."""
    watched: str = ""
    """Which those are, in words."""


@dataclass(slots=True)
class JudgedRun:
    """What a live run and a replayed one have in common at their end: all that the report needs."""

    engine: Engine
    rules: RuleSet
    alerts: list[Alert]
    target: str
    steps: int
    seconds: float
    unit: str = "step"
    rank: int = 0
    world_size: int = 1
    resumed_from: int | None = None
    stop: StopRequest | None = None
    stop_held: bool = False
    """The stop is what would have happened (a replay)."""
    action_errors: list[dict[str, Any]] = field(default_factory=list)
    plugin_errors: list[dict[str, Any]] = field(default_factory=list)
    internal_errors: list[dict[str, Any]] = field(default_factory=list)
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    """What is known of other ranks, for which this one speaks."""
    places: Mapping[str, list[str]] = field(default_factory=dict)
    """Where the script does what: ``backward`` -> ``["train.py:31"]``."""

    @property
    def observing(self) -> bool:
        return bool(self.rules.settings.get("mode", "act") == "observe")


def live_report(
    run: JudgedRun,
    judged: list[Verdict],
    ending: Ending,
    *,
    capabilities: Capabilities | None,
    accepted_unused: list[str],
    unheard: str = "",
    overhead: dict[str, Any],
) -> dict[str, Any]:
    """The content of ``report.json`` of a live run: strict JSON values only.

    :param capabilities: of its trainer; None if no trainer came.
    :param accepted_unused: rules whose accepted alerts did not come.
    :param unheard: why the rank that speaks for all does not hear of this one; empty where it does.
    :param overhead: what watching cost.
    """
    report = run_report(run, judged, live_end(run, ending, judged))
    report["script_exit_code"] = ending.script_exit_code
    report["accepted_unused"] = accepted_unused or None
    report["unheard"] = unheard or None
    report["overhead"] = overhead
    report["places"] = dict(run.places) or None
    if capabilities is not None:
        report["trainer"] = capabilities.trainer
        report["capabilities"] = {
            "events": sorted(kind.value for kind in capabilities.events),
            "controls": sorted(capabilities.controls),
            "gaps": dict(capabilities.gaps),
        }
    if report["verdict"] == "not judged" and ending.advice:
        report["advice"] = ending.advice
    if ending.exception is not None:
        report["exception"] = describe(ending.exception)
    return {key: value for key, value in report.items() if value is not None}


def run_report(run: JudgedRun, judged: list[Verdict], ended: End) -> dict[str, Any]:
    """The part of the report that live runs and replays share; ``None`` values are left out.

    :param ended: what :func:`live_end` or :func:`judged_end` says.
    """
    stop = run.stop
    report: dict[str, Any] = {
        "format": REPORT_FORMAT,
        "version": REPORT_VERSION,
        "verdict": ended.verdict,
        "exit_code": ended.code,
        "exit_reason": ended.verdict,
        "exit_words": ended.words,
        "target": run.target,
        "steps": run.steps,
        "unit": run.unit,
        "seconds": run.seconds,
        "world_size": run.world_size,
        "rank": run.rank,
        "mode": "observe" if run.observing else "act",
        "fail_on": _fail_on(run.rules),
        "resumed_from": run.resumed_from,
        "rules_source": run.rules.source,
        "profile": run.rules.profile or None,
        "rules": {v.rule: verdict_json(v) for v in judged},
        "off": run.rules.off,
        "alerts": [alert_json(alert) for alert in run.alerts],
        "mutes": [
            {
                "rule": m.rule,
                "first": m.first,
                "last": m.last,
                "reason": m.reason,
                "hits": run.engine.mute_hits.get(i, 0),
            }
            for i, m in enumerate(run.engine.mutes)
        ],
        "action_errors": run.action_errors,
        "plugin_errors": run.plugin_errors,
        "internal_errors": run.internal_errors,
    }
    if stop is not None:
        report["stop"] = {
            "rule": stop.rule or None,
            **({"cause": stop.cause} if stop.cause else {}),
            "step": stop.step,
            "reason": stop.reason,
            "mode": stop.mode,
            "also": stop.also or [],
        }
        if run.stop_held:
            report["stop"]["held"] = True
    return {key: value for key, value in report.items() if value is not None}


def live_end(run: JudgedRun, ending: Ending, judged: list[Verdict]) -> End:
    """The end of a live run by the documented precedence.

    A script's own failure first, then our fault, an executed stop, and what :func:`judged_end` says.
    """
    stop = run.stop
    ruled = stop is not None and bool(stop.rule)
    if ending.signal is not None and not ruled:  # a launcher ends the ranks that are slower to stop than others
        return End(128 + ending.signal, "interrupted", f"ended by signal {ending.signal}")
    if ending.interrupted:
        return End(INTERRUPTED, "interrupted", "interrupted from the keyboard")
    children = ending.children.failed or ending.children.warned or ending.watched
    # A script fails because a process that it started has, more often than not.
    of_children = f"; {children}" if children else ""
    if ending.exception is not None:
        elsewhere = "; ".join(filter(None, (run.elsewhere.failed, run.elsewhere.unseen)))
        own = f"the script raised {type(ending.exception).__name__}"
        return End(1, "script failed", (f"{own} ({elsewhere})" if elsewhere else own) + of_children)
    if ending.script_exit_code and not ruled:
        own = f"the script itself exited with {ending.script_exit_code}"
        return End(ending.script_exit_code, "script failed", own + of_children)
    ours, theirs = run.elsewhere, ending.children
    if theirs.failed or theirs.warned:
        run = replace(run, elsewhere=Elsewhere(ours.failed or theirs.failed, ours.warned or theirs.warned, ours.unseen))
    end = judged_end(run, judged)
    if end.verdict == "not judged" and ending.watched and not run.steps:
        return End(OK, "ok", ending.watched)
    return end


def judged_end(run: JudgedRun, judged: list[Verdict]) -> End:
    """The end by what was judged: our fault, a stop, alerts at or above ``fail_on``, required rules without data,
    alerts below it, nothing judged, ok. A replay uses it as a live run does.

    A run with an alert of warning or above that is neither muted nor accepted is never ok, whatever became of the
    alert: recovered, held back by another one, or in observe mode.
    """
    if run.internal_errors:
        return End(INTERNAL, "internal error", "healthcheck itself failed; please report it")
    stop = run.stop
    if stop is not None and stop.rule:
        if run.stop_held:
            return End(ALERTS, "stopped", f"at step {stop.step:,} by {stop.rule} (replayed)")
        return End(stop.exit_code or ALERTS, "stopped", f"at step {stop.step:,} by {stop.rule}")
    # Observing promises to leave the script's exit code alone, unless somebody asked on the command line.
    lenient = run.observing and not _asked_for(run.rules, "fail_on")
    failing = [] if lenient else _failing(run)
    if failing:
        return End(ALERTS, "failed", f"{plural(len(failing), 'alert')} at or above {_fail_on(run.rules)}")
    if run.elsewhere.failed and not lenient:
        return End(ALERTS, "failed", run.elsewhere.failed)
    without = [_name(c) for v in judged for c in v.causes if c.required and c.outcome is Outcome.NOT_JUDGED]
    if without and not lenient:
        return End(ALERTS, "failed", f"required but not judged: {', '.join(without)}")
    others = run.elsewhere.failed or run.elsewhere.warned
    if others or _warning(run):
        return End(
            OK, "warned", "; ".join(filter(None, [others, "observe mode: alerts do not count" if lenient else ""]))
        )
    if not any(v.outcome in _JUDGED for v in judged):
        why = "no rules" if not judged else "no training step was seen" if not run.steps else "no rule had data"
        return End(OK if lenient else NOTHING_JUDGED, "not judged", why)
    unseen = f"of this rank only: {run.elsewhere.unseen}" if run.elsewhere.unseen else ""
    return End(OK, "ok", "; ".join(filter(None, ["observe mode" if lenient else "", unseen])))


LOST = "lost another rank"
"""What a rank says of its end that was left alone in a collective: whoever failed first is the reason."""
_LEFT_ALONE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|nccl|heartbeat", re.IGNORECASE
)


def ends_here(run: JudgedRun, ending: Ending | None = None) -> tuple[str, str]:
    """What fails a run and what it only warns of, in a few words for the other ranks: ``loss-not-finite at step 10``."""
    failing, warning = _failing(run), _warning(run)
    if failing:
        return _alert_words(failing), ""
    error = ending.exception if ending is not None else None
    if error is not None:
        left_alone = isinstance(error, RuntimeError) and run.world_size > 1 and _LEFT_ALONE.search(str(error))
        what = LOST if left_alone else f"the script raised {type(error).__name__}"
        return f"{what} at step {run.steps:,}", ""
    return "", _alert_words(warning)


def _alert_words(alerts: list[Alert]) -> str:
    return f"{alerts[0].rule} at step {alerts[0].fired_step:,}" if alerts else ""


def _warning(run: JudgedRun) -> list[Alert]:
    return [a for a in run.alerts if a.counts and a.severity >= Severity.WARNING]


_JUDGED = (Outcome.FAILED, Outcome.WARNED, Outcome.OK, Outcome.PARTLY_JUDGED)


def warnings_of(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Alerts of a report at warning or above that are neither muted nor accepted: beside one of them no run is ok.

    Those that another alert explains are left out, unless there are no others.
    """
    counting = [
        alert
        for alert in report["alerts"]
        if Severity.parse(str(alert["severity"])) >= Severity.WARNING
        and not (alert.get("muted") or alert.get("accepted"))
    ]
    return [alert for alert in counting if not alert.get("explained_by")] or counting


def _asked_for(rules: RuleSet, setting: str) -> bool:
    """Whether the command line gave a setting."""
    origin = rules.setting_origins.get(setting)
    return origin is not None and origin.path.startswith("--")


def _fail_on(rules: RuleSet) -> str:
    return str(rules.settings.get("fail_on", "error"))


def _failing(run: JudgedRun) -> list[Alert]:
    return failing_alerts(run.alerts, _fail_on(run.rules))


def failing_alerts(alerts: Iterable[Alert], level: str) -> list[Alert]:
    """Those that fail a run.

    :param level: severity from which alerts count, or ``never``: ``fail_on``.
    """
    if level == "never":
        return []
    counting = [a for a in alerts if a.counts and a.severity >= Severity.parse(level)]
    # What another alert explains is one trouble with it; but if that one is below the level, it still counts.
    return [a for a in counting if not a.explained_by] or counting


def _name(verdict: Verdict) -> str:
    return f"{verdict.rule}.{verdict.cause}" if verdict.cause else verdict.rule


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
    if verdict.remedy:
        entry["remedy"] = verdict.remedy
    if verdict.needs_steps:
        entry["needs_steps"] = verdict.needs_steps
    if verdict.required:
        entry["required"] = True
    if verdict.closest is not None:
        entry["closest"] = {"score": encode_number(verdict.closest), "step": verdict.closest_step}
    if verdict.causes:
        if verdict.missing and verdict.outcome is not Outcome.NOT_JUDGED:
            entry["missing"] = [cause.cause for cause in verdict.missing]
        if verdict.causes[0].cause:
            entry["causes"] = {
                cause.cause: {"kind": str(cause.kind), **verdict_json(cause)} for cause in verdict.causes
            }
        else:
            entry["kind"] = str(verdict.causes[0].kind)
    return entry
