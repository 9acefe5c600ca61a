"""What one evaluation of the engine brings, and how the samples of several steps are told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from healthcheck.engine.planning import PlannedAction
from healthcheck.samples import Sample
from healthcheck.verdicts import Alert, Transition


@dataclass(slots=True)
class Evaluation:
    """What one evaluation brought. Empty most of the time."""

    alerts: list[Alert] = field(default_factory=list)
    """New episodes and repeats under ``cooldown``, in file order."""
    cleared: list[Alert] = field(default_factory=list)
    transitions: list[Transition] = field(default_factory=list)
    plan: list[PlannedAction] = field(default_factory=list)
    """Actions in the order in which they must run."""

    def __bool__(self) -> bool:
        return bool(self.alerts or self.cleared or self.transitions)


NOTHING = Evaluation()


def step_by_step(samples: Sequence[Sample]) -> list[Sequence[Sample]]:
    """Values of several steps may arrive at once; a guard or a formula must see those of its own step.

    Live runs and replays of their records cut an evaluation up in this way, so that both judge alike.
    """
    parts: list[Sequence[Sample]] = []
    begin = 0
    for index in range(1, len(samples)):
        if samples[index].step != samples[begin].step:
            parts.append(samples[begin:index])
            begin = index
    parts.append(samples[begin:] if begin else samples)
    return parts
