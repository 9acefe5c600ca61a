"""How every rule ended: failed, warned, ok, partly judged, or not judged with its reason; and each of its causes."""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.core.alerts import Finding, Outcome, Severity, State, Verdict
from healthcheck.engine.engine import Engine
from healthcheck.engine.episodes import RuleState
from healthcheck.engine.rulestate import CauseState
from healthcheck.rulelang.rule import Cause


def verdicts(engine: Engine, why_no_data: Callable[[Cause], str]) -> list[Verdict]:
    """One verdict per rule, in file order, with one for each of its causes.

    :param why_no_data: the reason why a cause's metric gave no sample ("no GPU", ...).
    """
    return [_of_rule(rule, why_no_data) for rule in engine.rules.values()]


def _of_rule(state: RuleState, why_no_data: Callable[[Cause], str]) -> Verdict:
    causes = [_of_cause(cause, why_no_data) for cause in state.causes]
    rule = state.rule
    verdict = Verdict(
        rule=rule.id,
        outcome=Outcome.OK,
        severity=rule.severity,
        origin=str(rule.origin),
        episodes=len(state.episodes),
        samples=sum(cause.samples for cause in causes),
        required=any(cause.required for cause in causes),
        causes=causes,
    )
    if len(causes) == 1:
        only = causes[0]
        verdict.closest, verdict.closest_step, verdict.threshold = only.closest, only.closest_step, only.threshold
    outcomes = {cause.outcome for cause in causes}
    for outcome in (Outcome.FAILED, Outcome.WARNED):
        if outcome in outcomes:
            verdict.outcome = outcome
            return verdict
    if not state.applies:
        verdict.outcome = Outcome.DOES_NOT_APPLY
        for cause in causes:
            cause.outcome, cause.reason = Outcome.DOES_NOT_APPLY, ""
    elif outcomes == {Outcome.NOT_JUDGED}:
        verdict.outcome = Outcome.NOT_JUDGED
        verdict.reason = "; ".join(dict.fromkeys(cause.reason for cause in causes))
    elif Outcome.NOT_JUDGED in outcomes:
        verdict.outcome = Outcome.PARTLY_JUDGED
        verdict.reason = "; ".join(f"{cause.cause}: {cause.reason}" for cause in verdict.missing)
    return verdict


def _of_cause(state: CauseState, why_no_data: Callable[[Cause], str]) -> Verdict:
    cause = state.rule
    closest = state.closest
    verdict = Verdict(
        rule=cause.rule,
        cause=cause.name,
        kind=cause.kind,
        outcome=Outcome.OK,
        severity=cause.severity,
        origin=str(cause.origin),
        episodes=len(state.findings),
        samples=state.samples,
        required=cause.required,
        closest=closest[0] if closest else None,
        closest_step=closest[1] if closest else None,
        threshold=cause.condition.breaches.text,
    )
    counted = [finding for finding in state.findings if _counts(finding)]
    if counted:
        worst = max(finding.severity for finding in counted)
        verdict.outcome = Outcome.FAILED if worst is Severity.ERROR else Outcome.WARNED
        return verdict
    if state.findings:
        return verdict  # muted, accepted, or a mere note: it was judged all the same
    if not any(s is not None and s.state in (State.OK, State.PENDING, State.FIRING) for s in state.series.values()):
        verdict.outcome = Outcome.NOT_JUDGED
        verdict.reason = _why_not(state, why_no_data)
    return verdict


def _counts(finding: Finding) -> bool:
    return finding.counts and finding.severity > Severity.INFO


def _why_not(state: CauseState, why_no_data: Callable[[Cause], str]) -> str:
    rule = state.rule
    if not state.samples:
        if state.held:
            guards = ", ".join(g.metric for g in rule.only_if)
            return f"its guard ({guards}) never held"
        return why_no_data(rule)
    had = max((s.n for s in state.series.values() if s is not None), default=0)
    need = max(rule.min_samples, rule.condition.min_samples)
    if rule.warmup.amount and rule.warmup.unit == "samples":
        need = max(need, int(rule.warmup.amount) + 1)
    if had <= need:
        return (
            f"needs {max(need, had + 1)} samples (had {had})"  # a baseline must be full before a sample is judged by it
        )
    others = dict.fromkeys(str(s) for s, _ in rule.condition.parts if s is not None)
    if others and not rule.warmup.amount:
        return f"no sample of {' or '.join(others)} came with it"
    return f"still warming up ({rule.warmup})"
