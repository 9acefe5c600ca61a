"""How a run ended: exit code, why a rule was not judged, and the content of ``report.json``.

The report is a contract, described in docs/reference/report.md; every other output derives from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from healthcheck.core.alerts import ActionOutcome, Alert, Finding, Outcome, SeriesFact, Severity, Verdict
from healthcheck.core.events import EventKind
from healthcheck.core.protocols import Capabilities
from healthcheck.core.samples import encode_number
from healthcheck.engine.engine import Engine
from healthcheck.extend.registry import Registry
from healthcheck.rulelang.rule import Cause, Derived, RuleSet
from healthcheck.run.actor import StopRequest

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


def live_report(
    run: JudgedRun,
    judged: list[Verdict],
    ending: Ending,
    *,
    capabilities: Capabilities | None,
    accepted_unused: list[str],
    overhead: dict[str, Any],
) -> dict[str, Any]:
    """The content of ``report.json`` of a live run: strict JSON values only.

    :param capabilities: of its trainer; None if no trainer came.
    :param accepted_unused: rules whose accepted alerts did not come.
    :param overhead: what watching cost.
    """
    report = run_report(run, judged, exit_code(run, ending, judged))
    report["script_exit_code"] = ending.script_exit_code
    report["accepted_unused"] = accepted_unused or None
    report["overhead"] = overhead
    if capabilities is not None:
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
            **({"cause": stop.cause} if stop.cause else {}),
            "step": stop.step,
            "reason": stop.reason,
            "mode": stop.mode,
            "also": stop.also or [],
        }
        if run.stop_held:
            report["stop"]["held"] = True
    return {key: value for key, value in report.items() if value is not None}


def exit_code(run: JudgedRun, ending: Ending, judged: list[Verdict]) -> tuple[int, str, str]:
    """``(code, reason, words)`` of a live run by the documented precedence.

    A script's own failure first, then our fault, an executed stop, and what
    :func:`judged_exit_code` says.
    """
    stop = run.stop
    ruled = stop is not None and bool(stop.rule)
    if ending.signal is not None and not ruled:  # a launcher ends the ranks that are slower to stop than others
        return 128 + ending.signal, "interrupted", f"ended by signal {ending.signal}"
    if ending.interrupted:
        return INTERRUPTED, "interrupted", "interrupted from the keyboard"
    if ending.exception is not None:
        return 1, "script_error", f"the script raised {type(ending.exception).__name__}"
    if ending.script_exit_code and not ruled:
        return ending.script_exit_code, "script_error", f"the script itself exited with {ending.script_exit_code}"
    return judged_exit_code(run, judged)


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
    # Observing promises to leave the script's exit code alone, unless somebody asked on the command line.
    if run.observing and not _asked_for(run.rules, "fail_on"):
        return OK, "ok", "observe mode: alerts do not count"
    failing = _failing(run)
    if failing:
        return (
            ALERTS,
            "alert",
            f"{len(failing)} {'alert' if len(failing) == 1 else 'alerts'} at or above {_fail_on(run.rules)}",
        )
    without = [_name(c) for v in judged for c in v.causes if c.required and c.outcome is Outcome.NOT_JUDGED]
    if without:
        return ALERTS, "alert", f"required but not judged: {', '.join(without)}"
    if all(v.outcome in (Outcome.NOT_JUDGED, Outcome.DOES_NOT_APPLY) for v in judged):
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
    counting = [a for a in run.alerts if a.counts and a.severity >= Severity.parse(level)]
    # What another alert explains is one trouble with it; but if that one is below the level, it still counts.
    return [a for a in counting if not a.explained_by] or counting


def _verdict(judged: list[Verdict], stopped: bool) -> str:
    outcomes = {v.outcome for v in judged}
    if stopped or Outcome.FAILED in outcomes:
        return Outcome.FAILED.value
    if Outcome.WARNED in outcomes:
        return Outcome.WARNED.value
    judged_well = {Outcome.OK, Outcome.PARTLY_JUDGED} & outcomes
    return Outcome.OK.value if judged_well else Outcome.NOT_JUDGED.value


def _name(verdict: Verdict) -> str:
    return f"{verdict.rule}.{verdict.cause}" if verdict.cause else verdict.rule


# --------------------------------------------------------------------------- why a rule was not judged

NEEDS = {
    "cuda": "no GPU",
    "amp": "no GradScaler in use",
    "gate": "no rule holds back updates of this optimizer",
    "clipping": "the loop does not clip",
    "evaluation": "no evaluation seen",
    "ranks": "single process, needs 2 or more ranks",
    "linux": "not on Linux",
    "epochs": "the trainer announces no epochs",
    "optimizer": "no optimizer seen",
    "compile": "nothing is compiled",
    "tokens": "the number of tokens is not known",
    "max_steps": "the length of the run is not known",
}
"""What a metric may need (``Metric.needs``) -> why there was no sample."""


class UnjudgedReasons:
    """Knows why a rule's metric gave no sample.

    :param engine: what was seen.
    :param derived: metrics that the rule file defines by formulas.
    :param registry: which probe provides a metric, and what it needs.
    :param quarantined: whether an owner was switched off after errors.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        derived: Iterable[Derived],
        registry: Registry,
        quarantined: Callable[[str], bool],
    ) -> None:
        self._engine = engine
        self._derived = derived
        self._registry = registry
        self._quarantined = quarantined

    def why(self, rule: Cause, *, step: int, capabilities: Capabilities | None, seen: Collection[EventKind]) -> str:
        """One sentence fragment for the report.

        :param step: the last step of the run.
        :param capabilities: of its trainer; None if no trainer came.
        :param seen: kinds of event that came.
        """
        if not step:
            return "no training step was seen"
        # The order is from what is surest to what is only likely: the first answer that holds is given.
        key = rule.selector.key
        gaps = capabilities.gaps if capabilities is not None else {}
        for name in (key, rule.selector.metric):
            if name in gaps:
                return gaps[name]
        for derived in self._derived:
            if derived.name == rule.selector.metric:
                missing = [n for n in derived.inputs if n not in self._engine.lookups.last]
                return f"no sample of {', '.join(missing)}" if missing else "undefined for all samples"
        metric = self._registry.metrics.get(key)
        if metric is None:
            return f"nothing logged {rule.selector.metric}"
        probe = self._registry.metric_probe[key]
        if self._quarantined(probe.name):
            return f"the probe {probe.name} was switched off after errors"
        if capabilities is not None:
            unseen = [k for k in probe.listens_to if k not in capabilities.events]
            if len(unseen) == len(probe.listens_to):
                return gaps.get(unseen[0].value, f"{capabilities.trainer} does not show {unseen[0]}")
        met = self._needs_met(seen) if metric.needs else set()
        lacking = [need for need in metric.needs if need not in met]
        if lacking:
            return "; ".join(NEEDS.get(need, f"needs {need}") for need in lacking)
        # Updates that nobody sees take the gradients with them; a probe that listens to losses as well is not blind.
        if "before_update" in gaps and {"before_update", "loss"} & {*probe.listens_to} == {"before_update"}:
            return gaps["before_update"]
        if step < rule.every:
            return f"first due at step {rule.every:,}"
        return f"no sample of {rule.selector} was seen"

    def _needs_met(self, seen: Collection[EventKind]) -> set[str]:
        """What this run did have: another metric with the same need gave samples, or an event says so."""
        engine = self._engine
        metrics = {state.rule.selector.metric for state in engine.states if state.samples} | engine.lookups.last.keys()
        known = self._registry.metrics.values()
        met = {need for metric in known if metric.name in metrics for need in metric.needs}
        if {EventKind.EVAL_START, EventKind.EVAL_END} & set(seen):
            met.add("evaluation")
        if sys.platform.startswith("linux"):
            met.add("linux")
        return met


# --------------------------------------------------------------------------- verdicts and alerts as JSON


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


def alert_json(alert: Alert) -> dict[str, Any]:
    """One alert in the form of the report contract; what is absent is left out."""
    entry: dict[str, Any] = {
        "rule": alert.rule,
        "cause": alert.cause or None,
        "kind": str(alert.kind),
        "number": alert.number,
        "severity": str(alert.severity),
        "phase": alert.phase,
        "series": [_series_json(fact) for fact in alert.series],
        "count": alert.count,
        "rank": alert.rank,
        "episode": alert.episode,
        "fired_step": alert.fired_step,
        "cause_severity": _cause_severity(alert),
        "cause_step": alert.cause_step if alert.cause_step != alert.fired_step else None,
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
        "fingerprint": alert.fingerprint,
        "where": alert.where or None,
        "changes": [
            {"transition": "cause", "step": change.step, "from": change.before, "to": change.after}
            for change in alert.changes
        ]
        or None,
        "also": [finding_json(finding) for finding in alert.also] or None,
        "time": round(alert.time, 3),
        "facts": {key: _plain(value) for key, value in alert.facts.items()},
        "actions": [_action_json(outcome) for outcome in alert.actions],
    }
    return {key: value for key, value in entry.items() if value is not None}


def _cause_severity(alert: Alert) -> str | None:
    """Of the cause that speaks, where another one makes the alert more severe."""
    finding = alert.finding(alert.cause)
    return str(finding.severity) if finding is not None and finding.severity is not alert.severity else None


def finding_json(finding: Finding) -> dict[str, Any]:
    """What another cause of the same episode found; what is absent is left out."""
    entry: dict[str, Any] = {
        "cause": finding.cause,
        "kind": str(finding.kind),
        "severity": str(finding.severity),
        "phase": finding.phase,
        "series": [_series_json(fact) for fact in finding.series],
        "count": finding.count,
        "fired_step": finding.fired_step,
        "fired_sample": finding.fired_sample,
        "detected_step": finding.detected_step,
        "cleared_step": finding.cleared_step,
        "value": encode_number(finding.value),
        "score": encode_number(finding.score),
        "normal": encode_number(finding.normal),
        "threshold": finding.threshold,
        "message": finding.message,
        "hint": finding.hint or None,
        "docs": finding.docs or None,
        "muted": finding.muted or None,
        "accepted": finding.accepted or None,
        "where": finding.where or None,
        "facts": {key: _plain(value) for key, value in finding.facts.items()},
    }
    return {key: value for key, value in entry.items() if value is not None}


def _series_json(fact: SeriesFact) -> dict[str, Any]:
    return {
        "name": fact.name,
        "value": encode_number(fact.value),
        "score": encode_number(fact.score),
        "normal": encode_number(fact.normal),
    }


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
