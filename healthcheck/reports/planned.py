"""What a run would watch, before it starts: rules, metrics, what cannot be judged here and why. Torch-free."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from healthcheck.core.samples import Cost, Metric
from healthcheck.core.text import plural
from healthcheck.engine.lookups import RuleDemand
from healthcheck.extend.registry import Registry
from healthcheck.reports.alertblock import asks
from healthcheck.rulelang.rule import Cause, RuleSet
from healthcheck.run.unjudged import NEEDS, always_applies

_DEPENDS = {
    "amp": "only with a GradScaler",
    "clipping": "only if the loop clips",
    "evaluation": "only with evaluations",
    "tokens": "only if the number of tokens is known",
    "max_steps": "only if the length of the run is known",
    "compile": "only with torch.compile",
    "optimizer": "only with an optimizer",
    "gate": "only if a rule may hold back updates",
    "batches": "only with a DataLoader",
}
"""Needs that only the script can meet, where ``only with ...`` would not say it."""
_UNSAID = ("cuda", "linux", "ranks", "the graph of the loss")
"""Needs that the machine decides, and the one that every ordinary loop meets."""


@dataclass(slots=True)
class PlannedRule:
    """One rule as it would run here."""

    rule: Cause
    asks: str
    actions: list[str]
    may_stop: bool
    outside: str = ""
    """Why it does not apply here; empty if it does."""
    blocked: str = ""
    """It applies: why it will not be judged all the same; empty if it can be."""
    remedy: str = ""
    """What can be done about :attr:`blocked`."""
    depends: str = ""
    """What the script must do or have for it to apply."""
    cost: Cost = Cost.FREE

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule.id,
            "severity": str(self.rule.severity),
            "asks": self.asks,
            "then": self.actions,
            "may_stop": self.may_stop,
            "mode": self.rule.mode,
            "required": self.rule.required,
            "cost": self.cost.value,
            "here": "does not apply" if self.outside else "not judged" if self.blocked else "judged",
            "reason": self.outside or self.blocked or None,
            "remedy": self.remedy or None,
            "depends_on": self.depends or None,
            "origin": str(self.rule.origin),
        }


@dataclass(slots=True)
class Plan:
    """What ``healthcheck plan`` prints."""

    rules: list[PlannedRule]
    metrics: dict[str, int]
    """Metric key -> smallest ``every``."""
    probes: list[str]
    derived: dict[str, str] = field(default_factory=dict)
    """Derived metric -> its formula."""
    logged: list[str] = field(default_factory=list)
    """Metrics that only the script itself can log."""
    off: list[str] = field(default_factory=list)


def make_plan(rules: RuleSet, registry: Registry, *, max_steps: int | None = None) -> Plan:
    """Plan by demand, as a session does it: rules -> metrics -> probes."""
    demand = RuleDemand.of(rules.causes, rules.derived)
    formulas = {derived.name: derived for derived in rules.derived}
    known = set(registry.metrics)
    planned = [_plan_rule(rule, rules, registry, max_steps) for rule in rules.causes]
    probes = {registry.metric_probe[key].name for key in demand.every if key in registry.metric_probe}
    return Plan(
        planned,
        {key: every for key, every in sorted(demand.every.items()) if key not in formulas},
        sorted(probes),
        {name: derived.text for name, derived in formulas.items() if name in demand.every},
        sorted(key for key in demand.every if key not in known and key not in formulas),
        list(rules.off),
    )


def _plan_rule(rule: Cause, rules: RuleSet, registry: Registry, max_steps: int | None) -> PlannedRule:
    metrics = _metrics_of(rule, rules, registry)
    outside = next((text for metric in metrics for need in metric.needs if (text := missing_here(need))), "")
    depends = [_DEPENDS.get(need, f"only with {need}") for m in metrics for need in m.needs if need not in _UNSAID]
    blocked = remedy = ""
    if outside and always_applies(rule):
        blocked, outside = outside, ""
    if not outside and not blocked and max_steps is not None:
        blocked, remedy = cannot_fill(rule, max_steps), f"more than {plural(max_steps, 'step')}"
    costs = list(Cost)
    cost = max((metric.cost for metric in metrics), key=costs.index, default=Cost.FREE)
    actions = [action.name for action in rule.actions]
    stops = rule.may_stop and rules.settings.get("mode", "act") == "act"
    return PlannedRule(
        rule,
        asks(rule),
        actions,
        stops,
        outside,
        blocked,
        remedy if blocked else "",
        "; ".join(dict.fromkeys(depends)),
        cost,
    )


def _metrics_of(rule: Cause, rules: RuleSet, registry: Registry) -> list[Metric]:
    """The registered metrics that a rule rests on, through derived ones."""
    wanted = list(RuleDemand.of([rule], rules.derived).every)
    guards = {guard.metric for guard in rule.only_if}  # a guard without samples counts as satisfied
    return [registry.metrics[key] for key in wanted if key in registry.metrics and key not in guards]


def missing_here(need: str) -> str:
    """Why this machine cannot meet a need of a metric; empty if it can or if only the script knows.

    Asks the machine without importing torch: ``plan`` runs on login nodes.
    """
    if need == "cuda" and not _has_gpu():
        return NEEDS["cuda"].lacking
    if need == "linux" and not sys.platform.startswith("linux"):
        return NEEDS["linux"].lacking
    if need == "ranks" and int(os.environ.get("WORLD_SIZE", "1") or 1) < 2:
        return NEEDS["ranks"].lacking
    return ""


def _has_gpu() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
        return False
    return os.path.exists("/dev/nvidia0") or os.path.exists("/dev/kfd") or shutil.which("nvidia-smi") is not None


def cannot_fill(rule: Cause, max_steps: int) -> str:
    """Why a rule cannot be judged within so many steps: its warm-up, its window, its streak."""
    if rule.condition.absence == "seconds":
        return ""
    need = max(rule.min_samples, rule.condition.min_samples)
    if rule.condition.absence == "steps":
        need = math.ceil(rule.condition.breaches.healthy.high)
    elif rule.warmup.unit == "samples":
        need = max(need, int(rule.warmup.amount))
    if rule.warmup.unit == "steps" and rule.warmup.amount >= max_steps:
        return f"warms up for {rule.warmup}"
    if need * rule.every >= max_steps:
        every = f", one every {rule.every} steps" if rule.every > 1 else ""
        return f"needs {need:,} samples first{every}"
    streak = (rule.hold.need - 1) * rule.every
    warm = int(rule.warmup.amount) if rule.warmup.unit == "steps" else 0
    earliest = max(need * rule.every if rule.condition.baseline else 0, warm) + rule.every + streak
    return f"cannot fire before step {earliest:,}" if earliest > max_steps else ""


def by_reason(reasons: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Reason -> ids, of pairs of id and reason; those without a reason are left out."""
    found: dict[str, list[str]] = {}
    for rule, reason in reasons:
        if reason:
            found.setdefault(reason, []).append(rule)
    return found
