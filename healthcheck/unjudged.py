"""Why a rule could not be judged in a run: in words that say what would have to be there."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from healthcheck.events import EventKind

if TYPE_CHECKING:
    from healthcheck.session import Session

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


def why_no_data(session: Session, rule: Any) -> str:
    """Why a rule's metric gave no sample in this run."""
    if not session.step:
        return "no training step was seen"
    key = rule.selector.key
    gaps = session.controls.capabilities.gaps if session.controls is not None else {}
    for name in (key, rule.selector.metric):
        if name in gaps:
            return gaps[name]
    for derived in session.rules.derived:
        if derived.name == rule.selector.metric:
            missing = [n for n in derived.inputs if n not in session.engine.lookups.last]
            return f"no sample of {', '.join(missing)}" if missing else "undefined for all samples"
    metric = session.host.registry.metrics.get(key)
    if metric is None:
        return f"nothing logged {rule.selector.metric}"
    probe = session.host.registry.metric_probe[key]
    if session.dispatch.is_quarantined(probe.name):
        return f"the probe {probe.name} was switched off after errors"
    if session.controls is not None:
        unseen = [k for k in probe.listens_to if k not in session.controls.capabilities.events]
        if len(unseen) == len(probe.listens_to):
            return gaps.get(unseen[0].value, f"{session.controls.capabilities.trainer} does not show {unseen[0]}")
    met = _needs_met(session) if metric.needs else set()
    lacking = [need for need in metric.needs if need not in met]
    if lacking:
        return "; ".join(NEEDS.get(need, f"needs {need}") for need in lacking)
    if "before_update" in gaps and {"before_update", "loss"} & {*probe.listens_to} == {"before_update"}:
        return gaps["before_update"]
    if session.step < rule.every:
        return f"first due at step {rule.every:,}"
    return f"no sample of {rule.selector} was seen"


def _needs_met(session: Session) -> set[str]:
    """What this run did have: another metric with the same need gave samples, or an event tells of it."""
    engine = session.engine
    seen = {state.rule.selector.metric for state in engine.states if state.samples} | engine.lookups.last.keys()
    met = {need for metric in session.host.registry.metrics.values() if metric.name in seen for need in metric.needs}
    if {EventKind.EVAL_START, EventKind.EVAL_END} & session.event_cost.keys():
        met.add("evaluation")
    if sys.platform.startswith("linux"):
        met.add("linux")
    return met
