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
        wanted: list[tuple[str, int]] = [(key, 1) for key in extra]
        for rule in rules:
            wanted.append((rule.selector.key, rule.every))
            wanted += [(guard.metric, rule.every) for guard in rule.only_if]
            wanted += [(s.key, rule.every) for s, _ in rule.condition.parts if s is not None]
        while wanted:
            key, every = wanted.pop()
            known = demand.every.get(key)
            # Of two rules the one that looks more often decides: the other takes every n-th of its samples.
            if known is not None and known <= every:
                continue
            demand.every[key] = every
            if key in formulas:
                wanted += [(name, 1) for name in formulas[key].inputs]
        return demand

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
