"""``all`` and ``any``: conditions made of parts, each with its own memory and maybe its own metric."""

from __future__ import annotations

from typing import Any

from healthcheck.protocols import Condition, Scorer
from healthcheck.rulelang.rule import Selector
from healthcheck.samples import Sample


class Side:
    """One part that watches another metric; shared by all series of its rule."""

    __slots__ = ("breach", "condition", "scorer", "selector")

    def __init__(self, selector: Selector, condition: Condition) -> None:
        self.selector = selector
        self.condition = condition
        self.scorer = condition.start()
        self.breach: bool | None = None

    def feed(self, sample: Sample) -> None:
        if self.selector.matches(sample.labels):
            judged = _judge(self.condition, self.scorer, sample.value, sample.step)
            if judged is not None:
                self.breach = judged

    def state(self) -> Any:
        return {"breach": self.breach, "scorer": self.scorer.state()}

    def restore(self, state: Any) -> None:
        self.breach = state["breach"]
        self.scorer.restore(state["scorer"])


class CombinedScorer:
    """Counts breaching parts of one series; None while a part that is needed has not judged yet."""

    normal: float | None = None

    def __init__(self, parts: list[Condition | Side], *, need_all: bool) -> None:
        self.need_all = need_all
        self.parts: list[tuple[Condition, Scorer] | Side] = [
            part if isinstance(part, Side) else (part, part.start()) for part in parts
        ]
        costly = [(part, not isinstance(part, Side) and hasattr(part[1], "learn")) for part in self.parts]
        self._order = sorted(costly, key=lambda entry: entry[1])
        """Costly parts, those that can learn without judging, come last."""

    def update(self, value: float, step: int) -> float | None:
        breaches = unknown = 0
        failed = False
        for part, lazy in self._order:
            if isinstance(part, Side):
                judged = part.breach
            elif failed and lazy and value - value == 0.0:
                # One part of an `all` is false already: a costly one only learns.
                judged = False if part[1].learn(value, step) else None  # type: ignore[attr-defined]
            else:
                judged = _judge(part[0], part[1], value, step)
            if judged is None:
                unknown += 1
            elif judged:
                breaches += 1
            elif self.need_all:
                failed = True
        if unknown == len(self.parts) or (unknown and self.need_all):
            return None
        return float(breaches)

    def state(self) -> Any:
        return [None if isinstance(part, Side) else part[1].state() for part in self.parts]

    def restore(self, state: Any) -> None:
        for part, saved in zip(self.parts, state, strict=True):
            if not isinstance(part, Side):
                part[1].restore(saved)


def _judge(condition: Condition, scorer: Scorer, value: float, step: int) -> bool | None:
    if value - value != 0.0 and not condition.judges_nonfinite:
        return True  # non-finite breaches every numeric condition
    score = scorer.update(value, step)
    return None if score is None else condition.breaches(score)
