"""What rules want measured: metrics, and how often."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from healthcheck.core.agents import AgentNames
from healthcheck.rulelang.rule import Cause, Derived

NEVER = 2**62
"""A step that no run reaches."""


class RuleDemand:
    """Implements :class:`healthcheck.core.protocols.Demand`: metric key -> smallest ``every``."""

    def __init__(self) -> None:
        self.every: dict[str, int] = {}
        self._settled: dict[str, int] = {}
        """What takes the place of ``every`` once the run has settled."""
        self.has_settled = False
        self.stretch: dict[str, int] = {}
        """Factors by which the overhead budget stretched ``every``."""
        self.agents = AgentNames(self)
        """For what scripts log: which names mean a metric that is wanted."""
        self.due_now: AbstractSet[str] = self.every.keys()
        """Keys that are due at the step at hand, once there is one."""

    @classmethod
    def of(cls, rules: Iterable[Cause], derived: Iterable[Derived] = (), extra: Iterable[str] = ()) -> RuleDemand:
        """Demand of rules, of the derived metrics that they use, and of ``extra`` keys."""
        demand = cls()
        formulas = {d.name: d for d in derived}
        wanted: list[tuple[str, int, int]] = [(key, 1, 1) for key in extra]
        for rule in rules:
            pace = rule.every, rule.settled_every or rule.every
            wanted.append((rule.selector.key, *pace))
            wanted += [(guard.metric, *pace) for guard in rule.only_if]
            wanted += [(s.key, *pace) for s, _ in rule.condition.parts if s is not None]
        while wanted:
            key, every, settled = wanted.pop()
            known = demand.every.get(key, NEVER), demand._settled.get(key, NEVER)
            # Of two rules the one that looks more often decides: the other takes every n-th of its samples.
            pace = min(every, known[0]), min(settled, known[1])
            if pace == known:
                continue
            demand.every[key], demand._settled[key] = pace
            if key in formulas:
                wanted += [(name, 1, 1) for name in formulas[key].inputs]
        return demand

    def take(self, other: RuleDemand) -> None:
        """Want what ``other`` does from now on, and nothing else."""
        self.every.clear()
        self._settled = dict(other._settled)
        self.every.update(other._settled if self.has_settled else other.every)

    def settle(self) -> bool:
        """So many steps were made that some metrics are wanted less often from now on; False if none is."""
        changed = any(self.every.get(key, settled) != settled for key, settled in self._settled.items())
        self.has_settled = True
        self.every.update(self._settled)
        return changed

    def wants(self, key: str) -> bool:
        return key in self.every

    def every_of(self, key: str) -> int:
        """Steps from one at which a wanted key is due to the next, as things stand."""
        return self.every[key] * self.stretch.get(key, 1)

    def due(self, key: str, step: int) -> bool:
        every = self.every.get(key)
        return every is not None and step % (every * self.stretch.get(key, 1)) == 0

    def next_due(self, keys: Iterable[str], step: int) -> int:
        """The first step after ``step`` at which one of ``keys`` is due; :data:`NEVER` if nobody wants them."""
        found = NEVER
        for key in keys:
            if key in self.every:
                every = self.every[key] * self.stretch.get(key, 1)
                found = min(found, step - step % every + every)
        return found
