"""How every rule ended: failed, warned, ok, or not judged with its reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from healthcheck.core.alerts import Outcome, Severity, State, Verdict
from healthcheck.engine.engine import Engine
from healthcheck.engine.rulestate import RuleState
from healthcheck.rulelang.rule import Rule


def verdicts(
    engine: Engine, why_no_data: Callable[[Rule], str], broken: Mapping[str, str] | None = None
) -> list[Verdict]:
    """One verdict per rule, in file order.

    :param why_no_data: the reason why a rule's metric gave no sample ("no GPU", ...).
    :param broken: rules that could not be judged to the end, and why.
    """
    return [_verdict(state, why_no_data, broken or {}) for state in engine.states]


def _verdict(state: RuleState, why_no_data: Callable[[Rule], str], broken: Mapping[str, str]) -> Verdict:
    rule = state.rule
    closest = state.closest
    verdict = Verdict(
        rule=rule.id,
        outcome=Outcome.OK,
        severity=rule.severity,
        origin=str(rule.origin),
        episodes=len(state.episodes),
        samples=state.samples,
        required=rule.required,
        closest=closest[0] if closest else None,
        closest_step=closest[1] if closest else None,
        threshold=rule.condition.breaches.text,
    )
    counted = [alert for alert in state.episodes if alert.counts and alert.severity > Severity.INFO]
    if counted:
        worst = max(alert.severity for alert in counted)
        verdict.outcome = Outcome.FAILED if worst is Severity.ERROR else Outcome.WARNED
        return verdict
    if state.episodes:
        return verdict  # muted, explained, or a mere note: it was judged all the same
    if state.rule.id in broken:
        verdict.outcome = Outcome.NOT_JUDGED
        verdict.reason = broken[state.rule.id]
    elif not any(s is not None and s.state in (State.OK, State.PENDING, State.FIRING) for s in state.series.values()):
        verdict.outcome = Outcome.NOT_JUDGED
        verdict.reason = _why_not(state, why_no_data)
    return verdict


def _why_not(state: RuleState, why_no_data: Callable[[Rule], str]) -> str:
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
