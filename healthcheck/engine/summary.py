"""How every rule ended: failed, warned, ok, or not judged with its reason."""

from __future__ import annotations

import math
from collections.abc import Callable

from healthcheck.core.alerts import Missing, Outcome, Severity, State, Verdict
from healthcheck.engine.engine import Engine
from healthcheck.engine.rulestate import RuleState
from healthcheck.rulelang.rule import Rule


def verdicts(engine: Engine, why_no_data: Callable[[Rule], Missing], *, steps: int = 0) -> list[Verdict]:
    """One verdict per rule, in file order.

    :param why_no_data: why a rule's metric gave no sample (no GPU, ...), and what can be done about it.
    :param steps: length of the run, to say from which length on a rule would have been judged; 0: unknown.
    """
    return [_verdict(state, why_no_data, steps) for state in engine.states]


def _verdict(state: RuleState, why_no_data: Callable[[Rule], Missing], steps: int) -> Verdict:
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
    if not any(s is not None and s.state in (State.OK, State.PENDING, State.FIRING) for s in state.series.values()):
        missing = _why_not(state, why_no_data, steps)
        verdict.outcome = Outcome.NOT_JUDGED if missing.applies or rule.required else Outcome.DOES_NOT_APPLY
        verdict.reason, verdict.remedy, verdict.needs_steps = missing.reason, missing.remedy, missing.steps
    return verdict


def _why_not(state: RuleState, why_no_data: Callable[[Rule], Missing], steps: int) -> Missing:
    rule = state.rule
    if not state.samples:
        if state.held:
            guards = ", ".join(g.metric for g in rule.only_if)
            return Missing(f"its guard ({guards}) never held", applies=False)
        return why_no_data(rule)
    had = max((s.n for s in state.series.values() if s is not None), default=0)
    need = max(rule.min_samples, rule.condition.min_samples)
    if rule.warmup.amount and rule.warmup.unit == "samples":
        need = max(need, int(rule.warmup.amount) + 1)
    if had <= need:
        need = max(need, had + 1)  # a baseline must be full before a sample is judged by it
        return too_short(f"needs {need} samples (had {had})", _rounded(steps * need / had) if had else 0)
    others = dict.fromkeys(str(s) for s, _ in rule.condition.parts if s is not None)
    if others and not rule.warmup.amount:
        return Missing(f"no sample of {' or '.join(others)} came with it", applies=False)
    length = int(rule.warmup.amount) + rule.every if rule.warmup.unit == "steps" else 0
    return too_short(f"still warming up ({rule.warmup})", length)


def too_short(reason: str, steps: int) -> Missing:
    """A run that ended before this could be judged.

    :param steps: from which length on it is judged; 0: unknown.
    """
    return Missing(reason, f"run at least {steps:,} steps" if steps else "run longer", steps=steps)


def _rounded(steps: float) -> int:
    """Upwards to two digits: how often samples come is only known from those that came."""
    size: int = 10 ** max(0, len(str(int(steps))) - 2)
    return math.ceil(steps / size) * size
