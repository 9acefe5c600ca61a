"""Which rules may hold back an update before the host has seen its values, and by which bound.

On a GPU values reach the host one or two steps late. What is to keep a bad update from the weights
must be decided on the device, so it must be a comparison with something known before: the bound that the
rule's scorer publishes. Nothing here knows torch, and nothing is judged here: the engine does that when the value comes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from healthcheck.core.protocols import Bound
from healthcheck.core.samples import Labels, Sample
from healthcheck.engine.engine import Engine
from healthcheck.engine.rulestate import RuleState
from healthcheck.engine.series import SeriesState
from healthcheck.rulelang.rule import Rule

GATEABLE_METRICS = frozenset({"loss", "grad_norm", "grad_nonfinite", "grads.zero"})
"""Metrics whose value exists before the update."""

_GATING_ACTIONS = ("skip_update", "stop")
_HARMLESS_GUARDS = frozenset({"amp.skipped"})
"""Guards that need not be asked: the update that they would let through is not applied anyway."""


@dataclass(frozen=True, slots=True)
class Limit:
    """What one rule asks of one value that an update depends on."""

    rule: str
    bound: Bound
    excused: bool = False
    """Another rule owns values that are not finite."""

    def breached(self, value: float) -> bool:
        """Whether the value, known to the host, breaches."""
        return not self.bound.low <= value <= self.bound.high and not (self.excused and value - value != 0.0)


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
    return (
        "" if rule.condition.bounded else f"`{rule.condition.name}` draws no bound that the device could compare with"
    )


class GatingRules:
    """The rules of one engine that gate, and their limits as things stand.

    :param alike: with several ranks: metrics whose value is the same on all of them; None for a single
        process. A rule on another metric would make ranks hold back different updates.
    """

    def __init__(self, engine: Engine, *, alike: Collection[str] | None = None) -> None:
        self._engine = engine
        self._states = [
            state
            for state in engine.states
            if not why_not_gateable(state.rule) and (alike is None or state.rule.selector.metric in alike)
        ]
        self.rules = [state.rule for state in self._states]
        self.metrics = frozenset(rule.selector.metric for rule in self.rules)
        self._known: dict[tuple[str, Labels], list[tuple[RuleState, Limit | None]]] = {}
        self._restarts = engine.restarts
        """Restarts of the engine up to which ``_known`` holds."""

    def __bool__(self) -> bool:
        return bool(self.rules)

    def limits(self, samples: Sequence[Sample]) -> list[tuple[Sample, Limit]]:
        """What these samples must keep for the rules that would judge them and act."""
        found = []
        mutes = self._engine.mutes
        if self._restarts != self._engine.restarts:
            self._known.clear()
            self._restarts = self._engine.restarts
        for sample in samples:
            if sample.metric not in self.metrics:
                continue
            gates = self._known.get((sample.metric, sample.labels))
            if gates is None:
                gates = self._known[sample.metric, sample.labels] = self._gates(sample)
            for state, constant in gates:
                limit = constant or _limit(state, sample)
                if limit is None or (mutes and any(mute.covers(state.rule.id, sample.step) for mute in mutes)):
                    continue
                found.append((sample, limit))
        return found

    def _gates(self, sample: Sample) -> list[tuple[RuleState, Limit | None]]:
        """The rules that gate on one series, with their limits where these never change."""
        found: list[tuple[RuleState, Limit | None]] = []
        for state in self._states:
            if state.rule.selector.metric == sample.metric and state.rule.selector.matches(sample.labels):
                series = _series(state, sample)
                steady = series.scorer.memoryless and series.every == 1 and not series.warming
                found.append((state, _limit(state, sample) if steady else None))
        return found


def _series(state: RuleState, sample: Sample) -> SeriesState:
    """The series that will judge the sample. Looking at one before its first sample must not make it."""
    return state.series.get(sample.labels) or state.fresh_series(sample.labels)


def _limit(state: RuleState, sample: Sample) -> Limit | None:
    series = _series(state, sample)
    bound = series.bound(sample.step)
    return None if bound is None else Limit(state.rule.id, bound, series.excused)
