"""``all`` and ``any``: conditions made of parts, each with its own memory and maybe its own metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from healthcheck.engine.series import NOTHING_IS_QUIET
from healthcheck.protocols import Comparator, Condition, Scorer
from healthcheck.rulelang.rule import Selector
from healthcheck.samples import Sample

Learn = Callable[[float, int], bool]


class Side:
    """One part that watches another metric; shared by all series of its rule."""

    __slots__ = ("_is_value", "_quiet", "_test", "breach", "condition", "scorer", "selector")

    def __init__(self, selector: Selector, condition: Condition) -> None:
        self.selector = selector
        self.condition = condition
        self.scorer = condition.start()
        self.breach: bool | None = None
        self._is_value = bool(getattr(self.scorer, "is_identity", False))
        self._test = condition.breaches
        self._quiet = _quiet(condition.breaches)

    def feed(self, sample: Sample) -> None:
        """Take a sample that the selector matches."""
        value = sample.value
        if value - value != 0.0 and not self.condition.judges_nonfinite:
            self.breach = True  # non-finite breaches every numeric condition
            return
        score = value if self._is_value else self.scorer.update(value, sample.step)
        if score is not None:
            low, high = self._quiet
            self.breach = not low < score < high and self._test(score)

    def state(self) -> Any:
        return {"breach": self.breach, "scorer": self.scorer.state()}

    def restore(self, state: Any) -> None:
        self.breach = state["breach"]
        self.scorer.restore(state["scorer"])


class CombinedScorer:
    """Counts breaching parts of one series; None while a part that is needed has not judged yet.

    Parts that remember the same are told of each other (``join``), so that they learn it once. In an
    ``all`` that has failed already, a part that can ``learn`` without judging only does that.
    """

    normal: float | None = None

    def __init__(self, parts: list[Condition | Side], *, need_all: bool) -> None:
        self.need_all = need_all
        self.parts: list[Scorer | Side] = []
        self._sides: list[Side] = []
        judging: list[tuple[Scorer, Comparator, Learn | None]] = []
        for part in parts:
            if isinstance(part, Side):
                self.parts.append(part)
                self._sides.append(part)
            else:
                scorer = _joined(part.start(), [p for p in self.parts if not isinstance(p, Side)])
                self.parts.append(scorer)
                judging.append((scorer, part.breaches, getattr(scorer, "learn", None)))
        self._prompt = [(s.update, _quiet(test), test) for s, test, learn in judging if learn is None]
        self._lazy = [(s.update, test, learn) for s, test, learn in judging if learn is not None]

    def update(self, value: float, step: int) -> float | None:
        breaches = unknown = 0
        for side in self._sides:
            if side.breach is None:
                unknown += 1
            elif side.breach:
                breaches += 1
        for update, (low, high), test in self._prompt:
            score = update(value, step)
            if score is None:
                unknown += 1
            elif not low < score < high and test(score):
                breaches += 1
        if self._lazy:
            failed = self.need_all and breaches + unknown < len(self._sides) + len(self._prompt)
            for update, test, learn in self._lazy:
                if failed:
                    unknown += not learn(value, step)
                    continue
                score = update(value, step)
                if score is None:
                    unknown += 1
                elif test(score):
                    breaches += 1
                else:
                    failed = self.need_all
        if unknown and (self.need_all or unknown == len(self.parts)):
            return None
        return float(breaches)

    def state(self) -> Any:
        return [None if isinstance(part, Side) else part.state() for part in self.parts]

    def restore(self, state: Any) -> None:
        for part, saved in zip(self.parts, state, strict=True):
            if not isinstance(part, Side):
                part.restore(saved)


def _joined(scorer: Scorer, earlier: list[Scorer]) -> Scorer:
    """The scorer, or one in its place that reads what an earlier part remembers."""
    join: Callable[[Scorer], Scorer | None] | None = getattr(scorer, "join", None)
    if join is not None:
        for other in earlier:
            joined = join(other)
            if joined is not None:
                return joined
    return scorer


def _quiet(test: Comparator) -> tuple[float, float]:
    """The scores between which a comparator is false, so that it need not be called."""
    quiet: tuple[float, float] = getattr(test, "quiet", NOTHING_IS_QUIET)
    return quiet
