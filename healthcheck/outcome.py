"""How a run ended: exit code, its reason in words, and the content of ``report.json``.

The report is a contract, described in docs/reference/report.md; every other output derives from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from healthcheck.alertjson import alert_json as alert_json
from healthcheck.alertjson import verdict_json as verdict_json
from healthcheck.engine.engine import Engine
from healthcheck.engine.summary import verdicts
from healthcheck.latch import StopRequest
from healthcheck.rulelang.rule import RuleSet
from healthcheck.unjudged import why_no_data as why_no_data
from healthcheck.verdicts import Alert, Outcome, Severity, Verdict

if TYPE_CHECKING:
    from healthcheck.session import Session

REPORT_FORMAT = "healthcheck-report"
REPORT_VERSION = 1

OK, ALERTS, INTERRUPTED, INTERNAL, USAGE, NOTHING_JUDGED = range(6)


@dataclass(slots=True)
class Ending:
    """How the watched code itself came to its end."""

    script_exit_code: int | None = None
    """The script's own ``sys.exit`` status; None in-process (``watch``)."""
    exception: BaseException | None = None
    interrupted: bool = False
    signal: int | None = None


@dataclass(slots=True)
class JudgedRun:
    """What a live run and a replayed one have in common at their end: all that the report needs."""

    engine: Engine
    rules: RuleSet
    alerts: list[Alert]
    reason_without_data: Callable[[Any], str]
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

    @property
    def observing(self) -> bool:
        return bool(self.rules.settings.get("mode", "act") == "observe")


def judged_run(session: Session) -> JudgedRun:
    """The live run of a session, as the report needs it."""
    return JudgedRun(
        engine=session.engine,
        rules=session.rules,
        alerts=session.alerts,
        reason_without_data=session.reason_without_data,
        target=session.info.target,
        steps=session.step,
        seconds=round(session.clock.monotonic() - session.active.started, 3),
        unit=session.unit,
        rank=session.info.rank,
        world_size=session.info.world_size,
        resumed_from=session.info.resumed_from,
        stop=session.stop_request,
        action_errors=session.actor.errors,
        plugin_errors=[session.contained.plugin_entry(error) for error in session.dispatch.errors]
        + [{"plugin": f.name, "hook": "load", "error": f.reason, "count": 1} for f in session.host.failures],
        internal_errors=session.internal_errors,
    )


def build_report(session: Session, ending: Ending) -> dict[str, Any]:
    """The content of ``report.json``: strict JSON values only."""
    judged = verdicts(session.engine, session.reason_without_data)
    report = run_report(judged_run(session), judged, exit_code(session, ending, judged))
    report["script_exit_code"] = ending.script_exit_code
    report["accepted_unused"] = sorted({e.rule for e in session.accepted.unused(session.info.target)}) or None
    report["overhead"] = _overhead(session)
    if session.controls is not None:
        capabilities = session.controls.capabilities
        report["trainer"] = capabilities.trainer
        report["capabilities"] = {
            "events": sorted(kind.value for kind in capabilities.events),
            "controls": sorted(capabilities.controls),
            "gaps": dict(capabilities.gaps),
        }
    if ending.exception is not None:
        report["exception"] = f"{type(ending.exception).__name__}: {ending.exception}"
    return {key: value for key, value in report.items() if value is not None}


def run_report(run: JudgedRun, judged: list[Verdict], ended: tuple[int, str, str]) -> dict[str, Any]:
    """The part of the report that live runs and replays share; ``None`` values are left out.

    :param ended: code, reason and words of :func:`exit_code` or :func:`judged_exit_code`.
    """
    stop = run.stop
    code, reason, words = ended
    report: dict[str, Any] = {
        "format": REPORT_FORMAT,
        "version": REPORT_VERSION,
        "verdict": _verdict(judged, stop is not None and bool(stop.rule)),
        "exit_code": code,
        "exit_reason": reason,
        "exit_words": words,
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
            "step": stop.step,
            "reason": stop.reason,
            "mode": stop.mode,
            "also": stop.also or [],
        }
        if run.stop_held:
            report["stop"]["held"] = True
    return {key: value for key, value in report.items() if value is not None}


def exit_code(session: Session, ending: Ending, judged: list[Verdict]) -> tuple[int, str, str]:
    """``(code, reason, words)`` by the documented precedence.

    A script's own failure first, then our fault, an executed stop, and what
    :func:`judged_exit_code` says.
    """
    stop = session.stop_request
    ruled = stop is not None and bool(stop.rule)
    if ending.signal is not None and not ruled:  # a launcher ends the ranks that are slower to stop than others
        return 128 + ending.signal, "interrupted", f"ended by signal {ending.signal}"
    if ending.interrupted:
        return INTERRUPTED, "interrupted", "interrupted from the keyboard"
    if ending.exception is not None:
        return 1, "script_error", f"the script raised {type(ending.exception).__name__}"
    if ending.script_exit_code and not ruled:
        return ending.script_exit_code, "script_error", f"the script itself exited with {ending.script_exit_code}"
    return judged_exit_code(judged_run(session), judged)


def judged_exit_code(run: JudgedRun, judged: list[Verdict]) -> tuple[int, str, str]:
    """``(code, reason, words)`` by what was judged: our fault, a stop, alerts at or above ``fail_on``,
    required rules without data, nothing judged, 0. A replay uses it as a live run does.
    """
    if run.internal_errors:
        return INTERNAL, "monitor_error", "healthcheck itself failed; please report it"
    stop = run.stop
    if stop is not None and stop.rule:
        if run.stop_held:
            return ALERTS, "alert", f"would have stopped at step {stop.step:,} by {stop.rule}"
        return stop.exit_code or ALERTS, "stop", f"stopped at step {stop.step:,} by {stop.rule}"
    if run.observing and not _asked_for(run.rules, "fail_on"):
        return OK, "ok", "observe mode: alerts do not count"
    failing = _failing(run)
    if failing:
        return (
            ALERTS,
            "alert",
            f"{len(failing)} {'alert' if len(failing) == 1 else 'alerts'} at or above {_fail_on(run.rules)}",
        )
    without = [v.rule for v in judged if v.required and v.outcome is Outcome.NOT_JUDGED]
    if without:
        return ALERTS, "alert", f"required but not judged: {', '.join(without)}"
    if all(v.outcome is Outcome.NOT_JUDGED for v in judged):
        why = "no rules" if not judged else "no training step was seen" if not run.steps else "no rule had data"
        return NOTHING_JUDGED, "nothing_judged", f"nothing was judged: {why}"
    return OK, "ok", "ok"


def _asked_for(rules: RuleSet, setting: str) -> bool:
    """Whether the command line gave a setting."""
    origin = rules.setting_origins.get(setting)
    return origin is not None and origin.path.startswith("--")


def _fail_on(rules: RuleSet) -> str:
    return str(rules.settings.get("fail_on", "error"))


def _failing(run: JudgedRun) -> list[Alert]:
    level = _fail_on(run.rules)
    if level == "never":
        return []
    return [a for a in run.alerts if a.counts and not a.explained_by and a.severity >= Severity.parse(level)] or [
        a for a in run.alerts if a.counts and a.severity >= Severity.parse(level)
    ]


def _verdict(judged: list[Verdict], stopped: bool) -> str:
    outcomes = {v.outcome for v in judged}
    if stopped or Outcome.FAILED in outcomes:
        return Outcome.FAILED.value
    if Outcome.WARNED in outcomes:
        return Outcome.WARNED.value
    return Outcome.OK.value if Outcome.OK in outcomes else Outcome.NOT_JUDGED.value


def _overhead(session: Session) -> dict[str, Any]:
    """Host time that watching took, per event kind and probe, in seconds."""
    seconds = session.clock.monotonic() - session.active.started
    total = sum(session.event_cost.values()) / 1e9
    timer = session.probing.device_time
    on_device = None if timer is None else timer.seconds_per_step()
    device = {} if on_device is None else {"device_seconds_per_step": round(on_device, 7)}
    return {
        **device,
        "host_seconds": round(total, 4),
        "fraction": round(total / seconds, 5) if seconds > 0 else 0.0,
        "events": {kind.value: round(ns / 1e9, 4) for kind, ns in session.event_cost.items()},
        "probes": {name: round(cost.ns / 1e9, 4) for name, cost in session.probing.cost.items()},
        "stretched": dict(session.budget.stretched),
    }
