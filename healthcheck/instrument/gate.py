"""Holding back a bad update: which rules may, by which bound, and how: on the device where the optimizer allows that, by a
wait where it must.

On a GPU values reach the host one or two steps late. What is to keep a bad update from the weights
must be decided on the device, so it must be a comparison with something known before: the bound that the
rule's scorer publishes. Nothing here knows torch, and nothing is judged here: the engine does that when the value comes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from healthcheck.core.protocols import FINITE, Bound
from healthcheck.core.rows import StepRow
from healthcheck.core.samples import Labels, Sample
from healthcheck.device.deferred import Deferred
from healthcheck.device.mailbox import READ_EVERY
from healthcheck.engine.engine import Engine
from healthcheck.engine.rulestate import CauseState
from healthcheck.engine.series import SeriesState
from healthcheck.probes.labels import optimizer_labels
from healthcheck.rulelang.rule import Cause

if TYPE_CHECKING:
    from healthcheck.run.session import Session

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


def why_not_gateable(rule: Cause) -> str:
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
            if not why_not_gateable(state.cause) and (alike is None or state.cause.selector.metric in alike)
        ]
        self.rules = [state.cause for state in self._states]
        self.metrics = frozenset(rule.selector.metric for rule in self.rules)
        self._known: dict[tuple[str, Labels], list[tuple[CauseState, Limit | None]]] = {}
        self.restarts = engine.restarts
        """Restarts of the engine up to which ``_known`` holds."""
        self.varying = False
        """Whether one of the limits asked for so far may be another one after the next judgement."""

    def __bool__(self) -> bool:
        return bool(self.rules)

    def limits(self, samples: Sequence[Sample]) -> list[tuple[Sample, Limit]]:
        """What these samples must keep for the rules that would judge them and act."""
        found = []
        mutes = self._engine.mutes  # asked each time: people mute rules of a run that goes on
        for sample in samples:
            if sample.metric not in self.metrics:
                continue
            for state, constant in self._gates(sample):
                limit = constant or _limit(state, sample)
                if limit is None or (mutes and any(mute.covers(state.cause.id, sample.step) for mute in mutes)):
                    continue
                found.append((sample, limit))
        return found

    def steady(self, samples: Sequence[Sample]) -> bool:
        """Whether the limits of these series are the same at every step until something is judged."""
        if self._engine.mutes:
            return False
        for sample in samples:
            for state, constant in self._gates(sample):
                if constant is not None:
                    continue
                series = _series(state, sample)
                if series.warming or series.every > 1:
                    return False
        return True

    def _gates(self, sample: Sample) -> list[tuple[CauseState, Limit | None]]:
        """The rules that gate on one series, with their limits where these never change."""
        if self.restarts != self._engine.restarts:
            self._known.clear()
            self.restarts, self.varying = self._engine.restarts, False
        known = self._known.get((sample.metric, sample.labels))
        if known is not None:
            return known
        found: list[tuple[CauseState, Limit | None]] = []
        for state in self._states:
            if state.cause.selector.metric == sample.metric and state.cause.selector.matches(sample.labels):
                # Thresholds and finiteness: what they ask now they ask at every step.
                series = _series(state, sample)
                steady = series.scorer.memoryless and series.every == 1 and not series.warming
                limit = _limit(state, sample) if steady else None
                self.varying = self.varying or limit is None
                found.append((state, limit))
        self._known[sample.metric, sample.labels] = found
        return found


def _series(state: CauseState, sample: Sample) -> SeriesState:
    """The series that will judge the sample. Looking at one before its first sample must not make it."""
    return state.series.get(sample.labels) or state.fresh_series(sample.labels)


def _limit(state: CauseState, sample: Sample) -> Limit | None:
    series = _series(state, sample)
    bound = series.bound(sample.step)
    return None if bound is None else Limit(state.cause.id, bound, series.excused)


# --------------------------------------------------------------------------------------------------
# Holding back a bad update: before the host knows of it where the optimizer allows that, by a wait where it must.
#
# Fused torch optimizers read ``found_inf`` on the device and leave weights, moments and step counters
# alone where it is 1; a ``GradScaler`` works that way. Others can only be kept from updating by taking
# their gradients away, which needs the host to know. What was tried for them and does not do:
# multiplying gradients by zero (NaN stays NaN, and AdamW decays and counts with zero gradients too),
# and putting back weights and moments with ``torch.where`` (a second copy of all of them).


_SAME_ON_ALL_RANKS = ("grad_norm", "grad_nonfinite", "grads.zero")
_REMEMBERED = 512


class UpdateGate:
    """One session's gate. Without rules that gate it costs one comparison a step."""

    def __init__(self, session: Session) -> None:
        self.waits = False
        """True while the update at hand can only be held back if the host waits for its values."""
        self._session = session
        self._setting = str(session.settings.get("gate", "auto"))
        self._rules: GatingRules | None = None
        self._engine: Engine | None = None
        """Whose rules these are: others may join until training begins."""
        self.now: list[tuple[Sample, Limit]] = []
        """Samples of the update at hand, with what rules ask of them."""
        self._ours: Any = None
        self._theirs: Any = None
        self._asked: dict[int, str] = {}
        self._inside_said = False
        self._ways: dict[int, str] = {}
        self.idle = False
        """Whether the update at hand cannot be held back: then nobody need know its bounds."""
        self.flags: tuple[int, dict[int, Any]] = (0, {})
        """Step and, by optimizer, 1 if its update was held back."""
        self.kept = False
        """Whether the update at hand was found to keep all bounds before its samples were made."""
        self.breach: Any = None
        """As :attr:`healthcheck.core.rows.StepRow.breach`, of the update at hand, where that is all there is to ask."""
        self._bounds: dict[int, tuple[float, float, float, float] | None] = {}
        """By optimizer: what loss and gradient norm must keep now; None where that does not say all."""
        self._asking: dict[int, list[str]] = {}
        """By optimizer: the rules that ask for that."""
        self._excused: set[int] = set()
        """Optimizers of which a rule leaves values that are not finite to another one: bounds alone do not say that."""
        self._bounds_of: tuple[int, float] = (-1, 0.0)
        """The judgement up to which they hold."""
        self._decided: deque[tuple[int, list[str]]] = deque(maxlen=_REMEMBERED)
        """Steps whose update was decided on before its rules were judged, with these rules."""

    @property
    def rules(self) -> GatingRules | None:
        """The rules that gate, or None. Known once the number of ranks is."""
        if self._engine is not self._session.engine:
            self._engine, self._bounds_of = self._session.engine, (-1, 0.0)
            self._bounds.clear()
            off = self._setting in ("off", "False") or self._session.observing
            alike = _SAME_ON_ALL_RANKS if self._session.info.world_size > 1 else None
            self._rules = GatingRules(self._session.engine, alike=() if off else alike) or None
            self._session.judge.gate = self if self._rules is not None else None
        return self._rules

    def alone(self, step: int) -> bool:
        """Of several ranks: whether others may apply an update that is held back here, as in a step that not all watch."""
        agreement = self._session.controls.agreement if self._session.controls is not None else None
        return agreement is None or not agreement.together(step) or not self._session.budget.in_turn(step)

    def see(self, samples: Sequence[Sample]) -> None:
        """Called with the samples of an event before they leave for the host."""
        assert self._rules is not None
        if self.idle:
            return
        step = self._session.step  # of the update, or of the one before where nothing else was shown of it
        self.now += self._rules.limits([sample for sample in samples if sample.step >= step])

    def keeps(self, row: StepRow, way: str) -> bool:
        """Whether an update that is noted in a row keeps all bounds, as far as the host knows.

        On a host two comparisons nearly always, with bounds that hold from one judgement to the next. On a device
        :meth:`arm` decides, and so the answer is yes.
        """
        if way == "wait":
            return False
        session = self._session
        if way == "device" and not self.now and row.breach is not None:
            self.breach = row.breach
            return True
        if way == "host" and not self.now:
            # As `_limits_of` does where nothing has been judged since, at one call less in every step.
            index, loss, norm = row.optimizer_index, row.loss, row.norm
            fresh = (session.engine.step, session.judge.judged_at) == self._bounds_of and index in self._bounds
            bounds = self._bounds[index] if fresh else self._limits_of(index, row.step)
            if (
                bounds
                and (loss is None or bounds[0] <= loss <= bounds[1])
                and (norm is None or bounds[2] <= norm <= bounds[3])
            ):
                self.kept = True
                if self.flags[0] != row.step:
                    self.flags = (row.step, {})
                self.flags[1][index] = 0.0
                return True
        before, made = list(self.now), session.board.take_rows()
        session.judge.waiting += made
        self.see(made)
        if way == "device":
            return True
        if any(type(sample.value) is float and limit.breached(sample.value) for sample, limit in self.now):
            self.now = before  # whoever judges the others shows them again
            return False
        self.kept = True
        self._flag(row.optimizer_index, 0.0)
        return True

    def device_limits(self, index: int, step: int) -> tuple[float, float, float, float] | None:
        """For :attr:`healthcheck.core.rows.Update.limits`; None where no device decides, or has more to compare."""
        if self._rules is None or "device" not in self._ways.values():
            return None
        limits = self._limits_of(index, step)
        return None if index in self._excused else limits

    def _limits_of(self, index: int, step: int) -> tuple[float, float, float, float] | None:
        """What loss and gradient norm of this optimizer must keep, as long as nothing is judged; None where there is more
        to compare than these two.
        """
        judged, engine = (self._session.engine.step, self._session.judge.judged_at), self._session.engine
        assert self._rules is not None
        if judged != self._bounds_of:
            self._bounds_of = judged
            if self._rules.varying or self._rules.restarts != engine.restarts or engine.mutes:
                self._bounds.clear()
        if index in self._bounds:
            return self._bounds[index]
        labels = optimizer_labels(index)
        low, high = {"loss": -math.inf, "grad_norm": -math.inf}, {"loss": math.inf, "grad_norm": math.inf}
        asked = [Sample(metric, step, 0.0, labels) for metric in sorted(self._rules.metrics)]
        rules: list[str] = []
        plain, excused, finite = True, set[str](), set[str]()
        for sample, limit in self._rules.limits(asked):
            rules.append(limit.rule)
            metric, bound = sample.metric, limit.bound
            (excused if limit.excused else finite).add(metric)  # no bound lets NaN pass
            if metric in low:
                low[metric], high[metric] = max(low[metric], bound.low), min(high[metric], bound.high)
            elif metric != "grad_nonfinite" or not bound.low <= 0.0 <= bound.high:  # a finite norm proves that none is
                plain = False
        if "grad_nonfinite" in self._rules.metrics:
            low["grad_norm"], high["grad_norm"] = max(low["grad_norm"], FINITE.low), min(high["grad_norm"], FINITE.high)
        found = (low["loss"], high["loss"], low["grad_norm"], high["grad_norm"]) if plain else None
        self._asking[index] = rules
        (self._excused.add if excused - finite else self._excused.discard)(index)
        if self._rules.steady(asked):
            self._bounds[index] = found
        return found

    def decided(self, step: int, rule: str) -> bool:
        """Whether the update of that step was let through or held back by this rule, before it was judged."""
        return any(step == number and rule in rules for number, rules in self._decided)

    def wants_loss(self) -> bool:
        """Whether a rule would hold back an update for its loss."""
        return self.rules is not None and "loss" in self.rules.metrics

    @property
    def nothing_held(self) -> bool:
        """Whether none of the optimizers that have stepped so far can be held back."""
        return bool(self._ways) and all(way == "none" for way in self._ways.values())

    def way(self, optimizer: Any) -> str:
        """How updates of ``optimizer`` can be held back, as long as its groups stay as they are.

        ``host``: its values are there when they are asked for. ``device``: by ``found_inf``, once it has state.
        ``wait``: only if the host waits for the device. ``none``: not at all, or nobody wants it.
        """
        if self.rules is None:
            return "none"
        kind = _device_kind(optimizer)
        if kind == "cpu":
            way = "host"
        elif self._setting == "sync":
            way = "wait"
        else:
            way = "none" if kind != "cuda" or why_not_by_device(optimizer) else "device"
        self._ways[id(optimizer)] = way
        return way

    def cannot(self, optimizer: Any, *, inside: bool = False) -> str:
        """One sentence if rules want to hold back updates of ``optimizer`` and cannot; said once each.

        :param inside: it steps while other gradients of the same backward pass are still being made.
        """
        if self.rules is not None and inside and not self._inside_said:
            self._inside_said = True
            return "optimizers step inside the backward pass, before all of its gradients are there"
        if self.rules is None or inside or id(optimizer) in self._asked or self._setting == "sync":
            return ""
        kind = _device_kind(optimizer)
        why = why_not_by_device(optimizer) if kind == "cuda" else ""
        if kind not in ("cuda", "cpu"):
            why = f"values on {kind} are read every {READ_EVERY} steps; `settings: {{gate: sync}}` waits for each"
        self._asked[id(optimizer)] = why
        return why

    def breached(self, index: int = 0) -> bool:
        """Whether the update at hand, of that optimizer, is bad, as far as the host knows."""
        rules = []
        for sample, limit in self.now:
            low, high = limit.bound.low, limit.bound.high
            value = sample.value
            if isinstance(value, float) and not low <= value <= high and limit.breached(value):
                rules.append(limit.rule)
        if rules:
            self._decided.append((self._session.step, rules))
        self._flag(index, 1.0 if rules else 0.0)
        return bool(rules)

    def arm(self, optimizer: Any, index: int = 0) -> None:
        """Have the device skip the update at hand if it is bad. :meth:`disarm` after the step."""
        flag, rules = device_flag(self.now) if self.now else None, [limit.rule for _, limit in self.now]
        number = flag
        if self.breach is not None:
            ours, number = self.breach
            rules += self._asking.get(index, ())
            if flag is not None:  # an event has shown more that an update depends on
                ours = number = ours.maximum(flag.to(ours.device, non_blocking=True))
            flag = ours
        if flag is None:
            return
        given = getattr(optimizer, "found_inf", None)
        if given is self._ours:  # of a step that raised
            given = None
        self._theirs = given
        if given is not None:
            import torch

            found = torch.maximum(given.reshape(()).to(flag.device, flag.dtype), flag)
        else:
            found = flag
        self._ours = optimizer.found_inf = found
        self._decided.append((self._session.step, rules))
        self._flag(index, number)

    def disarm(self, optimizer: Any) -> None:
        """Leave the optimizer as it was found."""
        if self._ours is None:
            return
        if getattr(optimizer, "found_inf", None) is self._ours:
            if self._theirs is None:
                del optimizer.found_inf
            else:
                optimizer.found_inf = self._theirs
        self._ours = self._theirs = None

    def _flag(self, index: int, flag: Any) -> None:
        step = self._session.step
        if self.flags[0] != step:
            self.flags = (step, {})
        self.flags[1][index] = flag


def device_flag(terms: Sequence[tuple[Sample, Limit]]) -> Any:
    """float32 0-dim: 1 if a sample breaks its limit, else 0; None if no sample is on a device."""
    import torch

    finite: Any = None
    bad: Any = None
    known = False
    seen: dict[int, Any] = {}
    """Values on the device by the deferred number: most rules ask about the same few."""
    summed: set[int] = set()
    with torch.no_grad():
        for sample, limit in terms:
            value, key = sample.value, id(sample.value)
            if isinstance(value, float):
                known = known or limit.breached(value)
                continue
            if key not in seen:
                value = value.on_device() if isinstance(value, Deferred) else value
                # float64 holds every value of a smaller type and every limit: what the host will compare is compared here.
                seen[key] = value.reshape(()).double() if isinstance(value, torch.Tensor) else value
            value = seen[key]
            if value is None:  # calculated by the host alone: its rule is judged when it has arrived
                continue
            if isinstance(value, float):
                known = known or limit.breached(value)
                continue
            if limit.bound == FINITE and not limit.excused:
                # Sums of finite numbers are finite in float64; one that is not spoils the sum.
                if key not in summed:
                    summed.add(key)
                    finite = value if finite is None else finite + value.to(finite.device, non_blocking=True)
            else:
                hit = value.clamp(limit.bound.low, limit.bound.high) != value  # NaN differs from itself
                if limit.excused:
                    hit &= (value - value) == 0
                bad = hit if bad is None else bad | hit.to(bad.device, non_blocking=True)
        if finite is not None:
            hit = (finite - finite) != 0
            bad = hit if bad is None else bad | hit.to(bad.device, non_blocking=True)
        if bad is None:
            return None
        return (bad | known if known else bad).float()


def why_not_by_device(optimizer: Any) -> str:
    """Empty if a torch optimizer heeds ``found_inf``, else why not and what would help."""
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim"):
        return f"{name} is not a torch optimizer, so it cannot be kept from updating without waiting for the device"
    if not all(group.get("fused") for group in optimizer.param_groups):
        return (
            f"{name} is not fused, so it cannot be kept from updating without waiting for the device: "
            "use fused=True, or `settings: {gate: sync}`"
        )
    if any(
        hasattr(p, "_fsdp_flattened") or hasattr(p, "_is_flat_param")
        for g in optimizer.param_groups
        for p in g["params"]
    ):
        return f"{name} holds shards of FSDP1, whose ranks could decide differently"
    return ""


def has_state(optimizer: Any) -> bool:
    """Whether every parameter with a gradient has optimizer state, where this optimizer keeps any."""
    if _stateless(optimizer):
        return True
    state = optimizer.state
    groups = optimizer.param_groups
    if len(state) >= sum(len(group["params"]) for group in groups):
        return True
    return all(p.grad is None or bool(state.get(p)) for group in groups for p in group["params"])


def _stateless(optimizer: Any) -> bool:
    return type(optimizer).__name__ == "SGD" and not any(group.get("momentum") for group in optimizer.param_groups)


def _device_kind(optimizer: Any) -> str:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            return "cuda" if parameter.is_cuda else str(parameter.device.type)
    return "cpu"
