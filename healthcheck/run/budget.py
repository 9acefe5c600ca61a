"""Keeping our own cost under a share of the training time: the setting ``overhead_budget``.

What watching costs depends on the loop: two milliseconds are nothing to a step of a second, and half of a step of four
milliseconds. So the session keeps an account. It is filled by the allowance and by a share of the training time, and our
own time is taken from it. While something is left, everything is watched: short runs are seen whole. Once it is empty the
costliest metrics are looked at less often, and where that is not enough, only one step in so many is watched, so that the
account stays as good as empty for the rest of the run. It can be overdrawn by what the last watched step took.
"""

from __future__ import annotations

import math
import random
import sys
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from statistics import median
from typing import Any

from healthcheck.core.alerts import Severity
from healthcheck.core.events import EventKind
from healthcheck.core.protocols import Action
from healthcheck.engine.lookups import RuleDemand
from healthcheck.rulelang.rule import Cause
from healthcheck.run.board import ProbeBoard

ALLOWANCE = 2.0
"""Seconds of our own time that every run may take before the budget binds."""
START_STEPS = 5
"""Steps at the beginning whose cost is that of the start: kernels are compiled there, models looked through."""
LOOK_EVERY = 50
"""Watched steps between two looks at what costs most."""
MOST = 64
"""How far ``every`` is stretched."""
MOST_APART = 10_000
"""Steps from one watched step to the next at most, whatever that costs."""
MOST_APART_TOGETHER = 100
"""The same where ranks watch two steps in so many: they hear of each other at those steps only."""
NOTICED = 0.005
"""Seconds: in loops with shorter steps nobody misses what the budget leaves out, and nothing is said of it."""
TRIAL = 24
"""Single steps that a trial leaves out, each between two that are watched: enough for a median whose error is a fifth of
the usual spread."""
BETWEEN_TRIALS = 5000
"""Watched steps from one trial to the next, so that trials leave out half a percent of the steps."""
RECENT = 0.1
"""Weight of the newest step in what steps are taken to cost and to last."""
FIRST_DISPLACED = 1.4
"""What a second of our time takes of the allowance: processor time of whole runs grew by 1.1 (a GAN) to 1.5 times (steps of 0.25 ms) what
our timers say of them, since caches that we have emptied cost the script afterwards. Later steps show what it is in this run."""
MOST_DISPLACED = 4.0
"""What a second of our time is counted as at most: a larger figure would be a disturbance of the machine."""
_ACTING = ("stop", "skip_update")
_ROUND = (1, 2, 5)


def one_in(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, 50 ... that is not below ``least``, :data:`MOST_APART` at most.

    Rules look at every 10th, 20th or 50th step: multiples of these numbers meet their steps.
    """
    scale = 1
    while scale <= MOST_APART:
        for digit in _ROUND:
            if digit * scale >= least:
                return min(digit * scale, MOST_APART)
        scale *= 10
    return MOST_APART


class OverheadBudget:
    """Says after each watched step how many steps are left out until the next.

    :param share: part of the training time that may be ours; None switches the budget off.
    :param demand: has the stretch of each metric.
    :param board: knows what each probe costs.
    :param keep: metrics that are never stretched (see :func:`acting_metrics`).
    """

    def __init__(
        self,
        share: float | None,
        *,
        demand: RuleDemand,
        board: ProbeBoard,
        keep: Collection[str],
    ) -> None:
        self.share = share
        self.binds_at = 0 if share is not None else sys.maxsize
        """Nanoseconds of our own time from which on :meth:`step_over` has something to do. On the step path: look here first."""
        self.whole = True
        """Whether every step is watched: until somebody has come who can leave steps out."""
        self.shared = False
        """Whether there are several ranks, which have to watch the same steps."""
        self.common = 0
        """All ranks have agreed to watch two steps in so many: each multiple and the step before, since some scripts average
        their replicas in every other update. 0: they have agreed on nothing."""
        self.asked = False
        """Whether somebody counts steps and calls :meth:`step_over` himself: the session need not."""
        self.stretched: dict[str, int] = {}
        """Metric key -> every how many steps it is measured now."""
        self.left_out = 0
        """Steps that were not watched, those of trials included."""
        self.every = 1
        """One step in so many is watched now."""
        self.displaced = 1.0
        """Seconds of training that a second of our own time costs, as far as can be known."""
        self._demand = demand
        self._board = board
        self.keep = keep
        self._random = random.Random(1)  # of our own: that of the training is the training's
        self.binds = self._marked = False
        """Whether the allowance is used up."""
        self._starting = START_STEPS
        """Steps that still belong to the start."""
        self._start_ns = 0
        """Our own time in the start, which is not charged."""
        self._waited = 0.0
        """The part of the time in which this thread waited for a processor."""
        self._watched = 0
        """Watched steps since the budget binds."""
        self._charged = 0.0
        """Seconds that the account was charged with."""
        self._step, self._own, self._active = 0, 0.0, 0.0
        """The step at the last look, and seconds of our own time and of training until then."""
        self._cost = self._idle = self._length = 0.0
        """Seconds that a watched step and one that is left out take from the account, and that a step lasts: of the last ones."""
        self._probes: dict[str, int] = {}
        self._gap: float | None = None
        """Seconds of a step that was left out just now."""
        self._pairs: deque[tuple[float, float]] = deque(maxlen=2 * TRIAL)
        """By how much a watched step took longer than the one before it that was left out, and what of that was ours."""
        self._trial = self._next_trial = 0
        """Steps that the trial at hand may still leave out, and the watched step at which the next is left out."""

    # -- after each watched step --------------------------------------------------------

    def step_over(self, step: int, own_ns: int, active: float) -> int:
        """How many steps are left out next; 0: none.

        :param own_ns: nanoseconds of host time that watching has taken in this run.
        :param active: seconds of active training in this run.
        """
        if self.share is None or own_ns < self.binds_at:
            return 0
        if self._starting:
            self._starting -= 1
            self._start_ns, self._active, self._step = own_ns, active, step
            self.binds_at = 0 if self._starting else own_ns + int(ALLOWANCE / 2 / FIRST_DISPLACED * 1e9)
            return 0
        own = (own_ns - self._start_ns) / 1e9
        spent, passed, steps = own - self._own, active - self._active, step - self._step
        self._own, self._active, self._step = own, active, step
        if not self.binds:
            # What steps cost is known from the second half of the allowance: the first has the start in it.
            if not self._marked:
                self._marked, self.binds_at = True, self._start_ns + int(ALLOWANCE / FIRST_DISPLACED * 1e9)
                self._probes = self._costs()
                return 0
            self.binds, self.binds_at = True, 0
            self._charged = own * (1.0 - self._waited) * FIRST_DISPLACED
            self._cost, self._length = spent / max(1, steps), passed / max(1, steps)
            self._look(max(1, steps))
        elif steps > 0:
            self._count(spent, passed, steps)
        if self.whole or steps <= 0:
            return 0
        return self._until_turn(step) if self.shared else self._pause(step, active)

    # -- several ranks ------------------------------------------------------------------

    def agreed(self, every: int) -> None:
        """All ranks watch two steps in so many from now on, whatever this rank's own account says."""
        self.common = every
        if self.share is not None:
            self.binds = self._marked = True
            self.binds_at = self._starting = 0

    def in_turn(self, step: int) -> bool:
        """Whether all ranks watch this step."""
        return self.common < 2 or (step + 1) % self.common < 2

    def _until_turn(self, step: int) -> int:
        """Steps until the next one that all ranks watch."""
        if self.common < 2 or self.in_turn(step + 1):
            return 0
        return self.common - 2 - step % self.common

    @property
    def wanted(self) -> int:
        """What all ranks should agree on, as far as this one can know: what they do, unless that is far from its account."""
        now = max(1, self.common)
        if not self.binds or self.share is None:
            return now
        gain = self.share * self._length - self._idle
        every = one_in(2 * self._cost / gain) if gain > 0 else MOST_APART
        every = 1 if every <= 2 else min(every, MOST_APART_TOGETHER)
        return every if every >= 2 * now or 4 * every <= now else now

    def put_off(self, own_ns: int, waited: float) -> bool:
        """Whether the allowance is not used up yet, because a part of what passed was spent waiting for a processor: on a
        busy machine our time is not what the clock says.

        :param waited: that part.
        """
        if self._starting:
            return False
        self._waited = waited
        reached = (own_ns - self._start_ns) * (1.0 - waited)
        due = ALLOWANCE / FIRST_DISPLACED * 1e9 * (1.0 if self._marked else 0.5)
        if reached >= due:
            return False
        self.binds_at = own_ns + int(due - reached) + 1
        return True

    def _count(self, spent: float, passed: float, steps: int) -> None:
        """One more watched step."""
        charged = spent * self.displaced
        self._charged += charged
        self._watched += 1
        self._cost += (charged / steps - self._cost) * RECENT
        if self._gap is None:
            self._length += (passed / steps - self._length) * RECENT
        else:
            self._pairs.append((passed - self._gap, spent))
            self._gap = None
            if len(self._pairs) >= TRIAL and not len(self._pairs) % TRIAL:
                self.displaced = displacement(self._pairs)
        if not self._watched % LOOK_EVERY:
            self._look(LOOK_EVERY)

    def gap_over(self, steps: int, own_ns: int, active: float, *, step: int) -> None:
        """Steps that were left out are over: the next one is watched. Called between the two.

        :param steps: how many it were; fewer than was said where something came up.
        :param step: the last of them.
        """
        own, passed = (own_ns - self._start_ns) / 1e9, active - self._active
        spent = (own - self._own) * self.displaced
        self._charged += spent
        self.left_out += steps
        self._own, self._active, self._step = own, active, step
        if steps > 0 and passed > 0:
            self._gap = passed / steps
            self._length += (self._gap - self._length) * (RECENT if steps == 1 else 0.5)
            self._idle += (spent / steps - self._idle) * 0.5

    def affords(self, launch_ns: float) -> bool:
        """Whether a launch in every step that is left out takes half of what steps may cost at most."""
        return launch_ns * 1e-9 * self.displaced <= (self.share or 0.0) * self._length / 2

    def credit(self, active: float) -> float:
        """Seconds that are left on the account after so many seconds of training."""
        return ALLOWANCE + (self.share or 0.0) * active - self._charged

    def _pause(self, step: int, active: float) -> int:
        """Steps until the account can pay for one again."""
        assert self.share is not None
        credit, gain = self.credit(active), self.share * self._length - self._idle
        self.every = every = one_in(self._cost / gain) if gain > 0 else MOST_APART
        if every == 1 and credit >= 0:
            return self._trial_gap()
        until = math.ceil(max(0.0, -credit) / gain) if gain > 0 else MOST_APART
        following = -(-(step + max(1, min(until, MOST_APART))) // every) * every
        return min(following - step, MOST_APART) - 1

    def _trial_gap(self) -> int:
        """Now and then a single step is left out, to see what watching displaces beyond its own time.

        Caches that we have emptied cost the script afterwards, and a device may wait for a host that is late: no timer of
        ours sees that.
        """
        if self._watched < self._next_trial:
            return 0
        self._trial = (self._trial or TRIAL) - 1
        self._next_trial = self._watched + (self._random.randint(3, 9) if self._trial else BETWEEN_TRIALS)
        return 1

    # -- what costs most --------------------------------------------------------------------

    def _costs(self) -> dict[str, int]:
        return {name: cost.ns for name, cost in self._board.cost.items()}

    def _look(self, steps: int) -> None:
        """Have the costliest probes look less often, as far as that brings a step nearer to what it may cost.

        :param steps: watched steps since the last look.
        """
        assert self.share is not None
        before, self._probes = self._probes, self._costs()
        costs = {name: (ns - before.get(name, 0)) / 1e9 / steps * self.displaced for name, ns in self._probes.items()}
        over = self._cost - self.share * self._length
        changed = False
        for name in sorted(costs, key=costs.__getitem__, reverse=True):
            # What is measured less often is found later: not for a twentieth of what a step costs.
            if over <= 0 or costs[name] < self._cost / 20:
                break
            keys = self._stretchable(name)
            for key in keys:
                self._demand.stretch[key] = 2 * self._demand.stretch.get(key, 1)
                self.stretched[key] = self._demand.every_of(key)
            if keys:
                changed = True
                over -= costs[name] / 2
                self._cost -= costs[name] / 2
        if changed:
            self._board.reschedule()

    def _stretchable(self, name: str) -> list[str]:
        """Metrics of a probe that may be measured less often than now."""
        probe, demand = self._board.probes[name], self._demand
        offered = getattr(probe, "stretchable", ())
        wanted = [m.key for m in probe.provides if m.key in offered and demand.wants(m.key)]
        return [key for key in wanted if key not in self.keep and demand.stretch.get(key, 1) < MOST]

    # -- the end --------------------------------------------------------------------------

    def facts(self, own_ns: int, events: Mapping[EventKind, int], seconds: float) -> dict[str, Any]:
        """Host time that watching took, per event kind and probe, in seconds, and what was left out: for the report.

        :param own_ns: nanoseconds of host time in all; ``events``: by kind of event.
        :param seconds: since the run began.
        """
        timer = self._board.device_time
        on_device = None if timer is None else timer.seconds_per_step()
        device = {} if on_device is None else {"device_seconds_per_step": round(on_device, 7)}
        total = own_ns / 1e9
        return {
            **device,
            "host_seconds": round(total, 4),
            "fraction": round(total / seconds, 5) if seconds > 0 else 0.0,
            "events": {kind.value: round(ns / 1e9, 4) for kind, ns in events.items()},
            "probes": {name: round(cost.ns / 1e9, 4) for name, cost in self._board.cost.items()},
            "stretched": dict(self.stretched),
            "steps_left_out": self.left_out,
            "displaced": round(self.displaced, 2),
        }

    def sentence(self, steps: int, active: float) -> str:
        """What the budget has left out, where a person would want to know; else empty.

        :param steps: of this run.
        :param active: seconds of active training in it.
        """
        if not steps or active / steps < NOTICED or self.share is None:
            return ""
        less = [f"{key} was measured every {every} steps" for key, every in sorted(self.stretched.items())]
        if self.left_out > 2 * TRIAL + steps * TRIAL // BETWEEN_TRIALS:
            less.insert(0, f"{steps - self.left_out:,} of {steps:,} steps were watched")
        if not less:
            return ""
        return (
            f"to keep within the budget of {self.share:.1%} of the training time, {'; '.join(less)} "
            "(overhead_budget: off watches all)"
        )


def displacement(pairs: Iterable[tuple[float, float]]) -> float:
    """Seconds of training that a second of our own time costs: 1, unless watched steps are clearly longer than that.

    :param pairs: by how much a watched step took longer than its neighbour that was not, and our own time in it.
    """
    longer, own = zip(*pairs, strict=True)
    usual, ours = median(longer), median(own)
    # 1.25 standard errors of a mean are one of a median; 1.48 times the median deviation is the standard deviation.
    error = 1.25 * 1.48 * median(abs(x - usual) for x in longer) / math.sqrt(len(longer))
    if ours <= 0 or usual - 2 * error <= ours:
        return 1.0
    return float(min(MOST_DISPLACED, usual / ours))


def what_the_budget_leaves_out(share: float) -> str:
    """For whoever plans a run: what may not be seen in it."""
    return (
        f"overhead_budget {share:.1%}: all steps are watched until that has taken {ALLOWANCE:g} s. Where watching costs more "
        "than its budget, costly metrics then come less often, and last of all only one step in so many is watched. Of the "
        "others a loss on the CPU that is not finite is seen at once, weights that are not finite at the next look. Gradients "
        "on a CUDA device are measured in every step, if that is within the budget; on the CPU a spike of them is not seen "
        "between two looks. (overhead_budget: off watches every step)"
    )


def acts_on(metric: str, rules: Iterable[Cause], actions: Mapping[str, Action]) -> bool:
    """Whether a rule looks at this metric whose action changes the run."""
    looking = [rule for rule in rules if rule.selector.metric == metric]
    done = [actions.get(spec.name) for rule in looking for spec in rule.actions]
    return any(action is not None and action.stage != "observe" for action in done)


def acting_metrics(rules: Iterable[Cause]) -> frozenset[str]:
    """Keys of the metrics of rules that act on the run or fail it."""
    return frozenset(
        rule.selector.key
        for rule in rules
        if rule.severity >= Severity.ERROR or any(spec.name in _ACTING for spec in rule.actions)
    )
