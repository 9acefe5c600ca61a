"""Keeping our own cost under a share of the training time: the setting ``overhead_budget``.

What a probe costs depends on the loop: two milliseconds are nothing to a step of a second, and half of a
step of four milliseconds. So the session measures itself, and where it costs more than its budget it has
the costliest metrics looked at less often. Rules that may stop a run or hold back an update keep theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from healthcheck.verdicts import Severity

if TYPE_CHECKING:
    from healthcheck.session import Session

OWN_TIME = "healthcheck.own_time"
"""Key in ``event.user_state``: a function that gives our own host time and the active training time, in seconds."""

CHECK_EVERY = 50
"""Steps between two looks."""
MIN_SECONDS = 20.0
"""Training shorter than this is left alone: start-up costs would be taken for the run's."""
MOST = 64
"""How far ``every`` is stretched."""
CLEARLY = 2.0
"""Times the budget at which a run is told that it cannot be kept."""
_ACTING = ("stop", "skip_update")


class OverheadBudget:
    """Measures one session's host time against its training time, and stretches ``every`` of what costs most.

    :param share: part of the training time that may be ours; None switches the budget off.
    """

    def __init__(self, session: Session, share: float | None) -> None:
        self._session = session
        self.share = share
        self.stretched: dict[str, int] = {}
        """Metric key -> every how many steps it is measured now."""
        self._steps = 0
        self._own = 0
        self._active = 0.0
        self._probes: dict[str, int] = {}
        self._said = False
        self._exhausted = share is None
        """Whether there is nothing to measure, or nothing left to stretch."""

    def step_ended(self) -> None:
        """Once per step; cheap but for one in :data:`CHECK_EVERY`."""
        self._steps += 1
        if self._exhausted or self._steps % CHECK_EVERY or self.share is None:
            return
        session = self._session
        active, own = session.active(), sum(session.event_cost.values())
        probes = {name: cost.ns for name, cost in session.probing.cost.items()}
        spent, passed = (own - self._own) / 1e9, active - self._active
        before, self._probes = self._probes, probes
        first = not self._active
        self._own, self._active = own, active
        if first or active < MIN_SECONDS or passed <= 0 or spent <= self.share * passed:
            return
        costs = {name: ns - before.get(name, 0) for name, ns in probes.items()}
        self._stretch(costs, spent / passed)

    def _stretch(self, costs: dict[str, int], share: float) -> None:
        """Have the costliest probe look half as often. One at a time: what is looked at less is found later."""
        demand = self._session.demand
        kept = self._kept()
        for name in sorted(costs, key=costs.__getitem__, reverse=True):
            probe = self._session.probing.probes[name]
            keys = [m.key for m in probe.provides if demand.wants(m.key) and m.key in getattr(probe, "stretchable", ())]
            keys = [key for key in keys if key not in kept and demand.stretch.get(key, 1) < MOST]
            if keys:
                for key in keys:
                    demand.stretch[key] = 2 * demand.stretch.get(key, 1)
                    self.stretched[key] = demand.every[key] * demand.stretch[key]
                self._session.probing.reschedule()
                self._say(keys, share)
                return
        self._exhausted = True
        if self.share is not None and share > CLEARLY * self.share:
            self._session.note(
                f"watching takes {share:.1%} of the training time, more than the budget of {self.share:.1%}, and no more of it can be "
                "measured less often: steps this short feel whatever is done in each. The profile minimal keeps little but "
                "the rules that may stop a run (--profile minimal)"
            )

    def _say(self, keys: list[str], share: float) -> None:
        if self._said:
            return
        self._said = True
        every = max(self.stretched[key] for key in keys)
        self._session.note(
            f"watching takes {share:.1%} of the training time, more than the budget of {self.share:.1%}: "
            f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} now measured every {every} steps, and others may follow "
            "(overhead_budget: off keeps every)"
        )

    def _kept(self) -> set[str]:
        """Metrics of rules that act on the run or fail it."""
        kept = set()
        for rule in self._session.rules.rules:
            if rule.severity >= Severity.ERROR or any(spec.name in _ACTING for spec in rule.actions):
                kept.add(rule.selector.key)
        return kept
