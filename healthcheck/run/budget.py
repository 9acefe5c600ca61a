"""Keeping our own cost under a share of the training time: the setting ``overhead_budget``.

What a probe costs depends on the loop: two milliseconds are nothing to a step of a second, and half of a
step of four milliseconds. So the session measures itself, and where it costs more than its budget it has
the costliest metrics looked at less often. Rules that may stop a run or hold back an update keep theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from healthcheck.core.alerts import Severity
from healthcheck.engine.routes import RuleDemand
from healthcheck.rulelang.rule import Cause
from healthcheck.run.board import ProbeBoard

CHECK_EVERY = 50
"""Steps between two looks."""
MIN_SECONDS = 20.0
"""Training shorter than this is left alone: start-up costs would be taken for the run's."""
MOST = 64
"""How far ``every`` is stretched."""
CLEARLY = 2.0
"""Times the budget at which it is said that the budget cannot be kept."""
_ACTING = ("stop", "skip_update")


class OverheadBudget:
    """Compares our host time with the training time, and stretches ``every`` of what costs most.

    :param share: part of the training time that may be ours; None switches the budget off.
    :param demand: has the stretch of each metric.
    :param board: knows what each probe costs.
    :param keep: metrics that are never stretched (see :func:`acting_metrics`).
    :param note: says one line to the user.
    """

    def __init__(
        self,
        share: float | None,
        *,
        demand: RuleDemand,
        board: ProbeBoard,
        keep: Collection[str],
        note: Callable[[str], None],
    ) -> None:
        self.share = share
        self.stretched: dict[str, int] = {}
        """Metric key -> every how many steps it is measured now."""
        self.steps_to_look = CHECK_EVERY
        """Counted down by the session, which calls :meth:`look` at 0."""
        self._demand = demand
        self._board = board
        self._keep = keep
        self._note = note
        self._own = 0
        self._active = 0.0
        self._probes: dict[str, int] = {}
        self._said = False
        self._exhausted = share is None
        """Whether there is nothing to measure, or nothing left to stretch."""

    def look(self, own_ns: int, active: float) -> None:
        """Compare what has passed since the last look.

        :param own_ns: nanoseconds of host time that watching has taken in this run.
        :param active: seconds of active training in this run.
        """
        self.steps_to_look = CHECK_EVERY
        if self._exhausted or self.share is None:
            return
        probes = {name: cost.ns for name, cost in self._board.cost.items()}
        spent, passed = (own_ns - self._own) / 1e9, active - self._active
        before, self._probes = self._probes, probes
        first = not self._active  # start-up costs are in it: only what comes after is compared
        self._own, self._active = own_ns, active
        if first or active < MIN_SECONDS or passed <= 0 or spent <= self.share * passed:
            return
        costs = {name: ns - before.get(name, 0) for name, ns in probes.items()}
        self._stretch(costs, spent / passed)

    def _stretch(self, costs: dict[str, int], share: float) -> None:
        """Have the costliest probe look half as often. One at a time: what is looked at less is found later."""
        assert self.share is not None
        demand = self._demand
        for name in sorted(costs, key=costs.__getitem__, reverse=True):
            probe = self._board.probes[name]
            keys = [m.key for m in probe.provides if demand.wants(m.key) and m.key in getattr(probe, "stretchable", ())]
            keys = [key for key in keys if key not in self._keep and demand.stretch.get(key, 1) < MOST]
            if keys:
                for key in keys:
                    demand.stretch[key] = 2 * demand.stretch.get(key, 1)
                    self.stretched[key] = demand.every_of(key)
                self._board.reschedule()
                self._say(keys, share)
                return
        self._exhausted = True
        if share > CLEARLY * self.share:
            self._note(
                f"watching takes {share:.1%} of the training time, more than the budget of {self.share:.1%}, and no more of it can be "
                "measured less often: steps this short feel whatever is done in each. The profile minimal keeps little but "
                "the rules that may stop a run (--profile minimal)"
            )

    def _say(self, keys: list[str], share: float) -> None:
        if self._said:
            return
        self._said = True
        every = max(self.stretched[key] for key in keys)
        self._note(
            f"watching takes {share:.1%} of the training time, more than the budget of {self.share:.1%}: "
            f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} now measured every {every} steps, and others may follow "
            "(overhead_budget: off keeps every)"
        )


def acting_metrics(rules: Iterable[Cause]) -> frozenset[str]:
    """Keys of the metrics of rules that act on the run or fail it."""
    return frozenset(
        rule.selector.key
        for rule in rules
        if rule.severity >= Severity.ERROR or any(spec.name in _ACTING for spec in rule.actions)
    )
