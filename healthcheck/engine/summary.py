"""How every rule ended: failed, warned, ok, partly judged, or not judged with its reason; and each of its causes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from healthcheck.core.alerts import Finding, Missing, Outcome, Severity, State, Verdict
from healthcheck.engine.engine import Engine
from healthcheck.engine.episodes import RuleState
from healthcheck.engine.rulestate import CauseState
from healthcheck.rulelang.rule import Cause
from healthcheck.rulelang.sources import is_pack_name

WhyNoData = Callable[[Cause], Missing]
"""Why a cause's metric gave no sample (no GPU, ...), and what can be done about it."""


def verdicts(
    engine: Engine, why_no_data: WhyNoData, broken: Mapping[str, str] | None = None, *, steps: int = 0
) -> list[Verdict]:
    """One verdict per rule, in file order, with one for each of its causes.

    :param broken: causes that could not be judged to the end, by name, and why.
    :param steps: length of the run, to say from which length on a cause would have been judged; 0: unknown.
    """
    return [_of_rule(rule, why_no_data, broken or {}, steps) for rule in engine.rules.values()]


def _of_rule(state: RuleState, why_no_data: WhyNoData, broken: Mapping[str, str], steps: int) -> Verdict:
    causes = [_of_cause(cause, why_no_data, broken, steps) for cause in state.causes]
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
        for cause in causes:
            cause.outcome, cause.reason, cause.remedy, cause.needs_steps = Outcome.DOES_NOT_APPLY, "", "", 0
        outcomes = {Outcome.DOES_NOT_APPLY}
    if outcomes == {Outcome.DOES_NOT_APPLY}:
        verdict.outcome = Outcome.DOES_NOT_APPLY
        verdict.reason = "; ".join(dict.fromkeys(cause.reason for cause in causes if cause.reason))
    elif outcomes <= {Outcome.NOT_JUDGED, Outcome.DOES_NOT_APPLY}:
        verdict.outcome = Outcome.NOT_JUDGED
        verdict.reason = "; ".join(dict.fromkeys(cause.reason for cause in verdict.missing))
        verdict.remedy = "; ".join(dict.fromkeys(cause.remedy for cause in verdict.missing if cause.remedy))
        verdict.needs_steps = max(cause.needs_steps for cause in verdict.missing)
    elif Outcome.NOT_JUDGED in outcomes:
        verdict.outcome = Outcome.PARTLY_JUDGED
        verdict.reason = "; ".join(f"{cause.cause}: {cause.reason}" for cause in verdict.missing)
    return verdict


def _of_cause(state: CauseState, why_no_data: WhyNoData, broken: Mapping[str, str], steps: int) -> Verdict:
    cause = state.cause
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
    if cause.id in broken:
        verdict.outcome = Outcome.NOT_JUDGED
        verdict.reason = broken[cause.id]
    elif not any(s.state in (State.OK, State.PENDING, State.FIRING) for s in state.judged()):
        missing = _why_not(state, why_no_data, steps)
        verdict.outcome = Outcome.NOT_JUDGED if missing.applies or cause.required else Outcome.DOES_NOT_APPLY
        verdict.reason, verdict.remedy, verdict.needs_steps = missing.reason, missing.remedy, missing.steps
    return verdict


def _counts(finding: Finding) -> bool:
    return finding.counts and finding.severity > Severity.INFO


def _why_not(state: CauseState, why_no_data: WhyNoData, steps: int) -> Missing:
    cause = state.cause
    by_user = not is_pack_name(cause.origin.path)  # without data it is not judged, whatever the run has
    if not state.samples:
        if state.held:
            guards = ", ".join(g.metric for g in cause.only_if)
            return Missing(f"its guard ({guards}) never held", applies=by_user)
        return why_no_data(cause)
    had = max((s.n for s in state.judged()), default=0)
    need = max(cause.min_samples, cause.condition.min_samples)
    if cause.warmup.amount and cause.warmup.unit == "samples":
        need = max(need, int(cause.warmup.amount) + 1)
    if had <= need:
        need = max(need, had + 1)  # a baseline must be full before a sample is judged by it
        return too_short(f"needs {need} samples (had {had})", _rounded(steps * need / had) if had else 0)
    others = dict.fromkeys(str(s) for s, _ in cause.condition.parts if s is not None)
    if others and not cause.warmup.amount:
        return Missing(f"no sample of {' or '.join(others)} came with it", applies=by_user)
    length = int(cause.warmup.amount) + cause.every if cause.warmup.unit == "steps" else 0
    return too_short(f"still warming up ({cause.warmup})", length)


def too_short(reason: str, steps: int) -> Missing:
    """A run that ended before this could be judged.

    :param steps: from which length on it is judged; 0: unknown.
    """
    return Missing(reason, f"run at least {steps:,} steps" if steps else "run longer", steps=steps)


def _rounded(steps: float) -> int:
    """Upwards to two digits: how often samples come is only known from those that came."""
    size: int = 10 ** max(0, len(str(int(steps))) - 2)
    return math.ceil(steps / size) * size
