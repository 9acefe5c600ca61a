"""Which rules may hold back an update before the host has seen its values, and by which bound.

On a GPU values reach the host one or two steps late. What is to keep a bad update from the weights
must be decided on the device, so it must be a comparison with something known before: finiteness, a
constant, or the bound that a condition would draw from the samples so far. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from healthcheck.engine.engine import Engine
from healthcheck.engine.rulestate import RuleState
from healthcheck.rulelang.comparators import COMPARATORS
from healthcheck.rulelang.rule import Rule
from healthcheck.samples import NO_LABELS, Labels, Sample

GATEABLE_METRICS = frozenset({"loss", "grad_norm", "grad_nonfinite", "grads.zero"})
"""Metrics whose value exists before the update."""

_GATING_ACTIONS = ("skip_update", "stop")
_HARMLESS_GUARDS = frozenset({"amp.skipped"})
"""Guards that need not be asked: the update that they would let through is not applied anyway."""


@dataclass(frozen=True, slots=True)
class Bound:
    """When a value is bad. Comparisons are false for NaN, so finiteness is asked for on its own."""

    nonfinite: bool = False
    low: float | None = None
    high: float | None = None
    inclusive: bool = False
    """Whether the limit itself is bad (``at_least``, ``at_most``)."""

    def breached(self, value: float) -> bool:
        """The same comparison for a value on the host."""
        if self.nonfinite:
            return value - value != 0.0
        above = self.high is not None and (value >= self.high if self.inclusive else value > self.high)
        below = self.low is not None and (value <= self.low if self.inclusive else value < self.low)
        return above or below


def why_not_gateable(rule: Rule) -> str:
    """Empty if a breach of ``rule`` can hold back its own update, else the reason."""
    if not any(spec.name in _GATING_ACTIONS for spec in rule.actions):
        return "it neither skips an update nor stops"
    if rule.mode != "act":
        return "it only observes"
    if rule.selector.metric not in GATEABLE_METRICS or rule.phase not in ("any", "train"):
        return f"{rule.selector.metric} is not known before the update"
    if rule.hold.need > 1 or rule.hold.seconds:
        return f"it waits for {rule.hold}"
    if any(spec.after > 1 for spec in rule.actions if spec.name in _GATING_ACTIONS):
        return "its action waits for a repetition"
    if any(guard.metric not in _HARMLESS_GUARDS for guard in rule.only_if):
        return "its guards are not known before the update"
    if rule.warmup.unit != "steps" and rule.warmup.amount:
        return "its warm-up does not count steps"
    kind = rule.condition.name
    if kind == "nonfinite":
        return "" if getattr(rule.condition, "window", 0) == 0 else "it counts over a window"
    if kind in COMPARATORS and kind != "equals":
        return ""
    if getattr(rule.condition.breaches, "kind", "") in ("above", "at_least") and hasattr(
        rule.condition.start(), "value_at"
    ):
        return ""
    return f"`{kind}` draws no bound that the device could compare with"


class GatingRules:
    """The rules of one engine that gate, and their bounds as things stand.

    :param alike: with several ranks: metrics whose value is the same on all of them; None for a single
        process. A rule on another metric would make ranks hold back different updates.
    """

    def __init__(self, engine: Engine, *, alike: Collection[str] | None = None) -> None:
        self._engine = engine
        self._by_metric: dict[str, list[Rule]] = {}
        self._states: dict[str, RuleState] = {}
        for state in engine.states:
            rule = state.rule
            if not why_not_gateable(rule) and (alike is None or rule.selector.metric in alike):
                self._states[rule.id] = state
                self._by_metric.setdefault(rule.selector.metric, []).append(rule)
        self.rules = [state.rule for state in self._states.values()]
        self.metrics = frozenset(self._by_metric)

    def __bool__(self) -> bool:
        return bool(self.rules)

    def bounds(self, sample: Sample) -> list[tuple[Rule, Bound]]:
        """The bounds that this sample must keep, of the rules that would act on it."""
        found = []
        for rule in self._by_metric.get(sample.metric, ()):
            if not rule.selector.matches(sample.labels) or not self._acts(rule, sample.step):
                continue
            bound = self._bound(rule, sample.labels)
            if bound is not None:
                found.append((rule, bound))
        return found

    def _acts(self, rule: Rule, step: int) -> bool:
        if step - self._states[rule.id].start_step <= rule.warmup.amount and rule.warmup.amount:
            return False
        if rule.every > 1 and step % rule.every:
            return False
        return not any(mute.covers(rule.id, step) for mute in self._engine.mutes)

    def _bound(self, rule: Rule, labels: Labels) -> Bound | None:
        condition = rule.condition
        if condition.name == "nonfinite":
            return Bound(nonfinite=True)
        breaches = condition.breaches
        low, high = getattr(breaches, "low", None), getattr(breaches, "high", None)
        inclusive = getattr(breaches, "kind", "") in ("at_least", "at_most")
        if condition.name in COMPARATORS:
            return Bound(low=low, high=high, inclusive=inclusive)
        series = self._states[rule.id].series.get(labels or NO_LABELS)
        if series is None or series.scorer.normal is None or high is None:
            return None  # it does not judge yet
        value_at = getattr(series.scorer, "value_at", None)
        return None if value_at is None else Bound(high=float(value_at(high)), inclusive=inclusive)
