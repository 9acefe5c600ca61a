"""``all`` and ``any``: conditions made of parts, each with its own memory and maybe its own metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from healthcheck.protocols import Comparator, Condition, Scorer
from healthcheck.rulelang.comparators import as_bounds
from healthcheck.rulelang.rule import Selector

Learn = Callable[[float, int], bool]
Test = tuple[float, float, "Comparator | None"]
"""Healthy scores, and what else must be asked; see :func:`~healthcheck.rulelang.comparators.as_bounds`."""


class Side:
    """One part that watches another metric; shared by all series of its rule.

    While its score depends on the newest value alone (``forgetful``), that is all that is kept until somebody asks.
    """

    __slots__ = ("_test", "breach", "condition", "forgetful", "newest", "scorer", "selector")

    def __init__(self, selector: Selector, condition: Condition) -> None:
        self.selector = selector
        self.condition = condition
        self.scorer = condition.start()
        self.breach: bool | None = None
        """Whether the last value that was scored breaches; None before the first score."""
        self.newest: tuple[float, int] | None = None
        """Value and step of what came since, while this is ``forgetful``."""
        self.forgetful: bool = getattr(self.scorer, "forgetful", False)
        self._test = as_bounds(condition.breaches)

    def score(self, value: float, step: int) -> None:
        """Score a value of a series that the selector matches."""
        self.newest = None
        if value - value != 0.0 and not self.condition.judges_nonfinite:
            self.breach = True  # non-finite breaches every numeric condition
            return
        score = self.scorer.update(value, step)
        if score is not None:
            low, high, test = self._test
            self.breach = (score < low or score > high) if test is None else test(score)
        self.forgetful = getattr(self.scorer, "forgetful", False)

    def state(self) -> Any:
        if self.newest is not None:
            self.score(*self.newest)
        return {"breach": self.breach, "scorer": self.scorer.state()}

    def restore(self, state: Any) -> None:
        self.breach = state["breach"]
        self.scorer.restore(state["scorer"])
        self.newest = None
        self.forgetful = getattr(self.scorer, "forgetful", False)


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
        prompt: dict[int, tuple[Callable[[float, int], float | None], list[Test]]] = {}
        self._lazy: list[tuple[Callable[[float, int], float | None], Comparator, Learn]] = []
        for part in parts:
            if isinstance(part, Side):
                self.parts.append(part)
                self._sides.append(part)
                continue
            scorer = _joined(part.start(), [p for p in self.parts if not isinstance(p, Side)])
            self.parts.append(scorer)
            learn: Learn | None = getattr(scorer, "learn", None)
            if learn is None:
                prompt.setdefault(id(scorer), (scorer.update, []))[1].append(as_bounds(part.breaches))
            else:
                self._lazy.append((scorer.update, part.breaches, learn))
        self._prompt = [*prompt.values()]
        self._first = len(self.parts) - len(self._lazy)
        """Parts that are always judged."""

    def update(self, value: float, step: int) -> float | None:
        breaches = unknown = 0
        for side in self._sides:
            if side.newest is not None:
                side.score(*side.newest)
            if side.breach is None:
                unknown += 1
            elif side.breach:
                breaches += 1
        for update, tests in self._prompt:
            score = update(value, step)
            if score is None:
                unknown += len(tests)
                continue
            for low, high, test in tests:
                if (score < low or score > high) if test is None else test(score):
                    breaches += 1
        if self._lazy:
            failed = self.need_all and breaches + unknown < self._first
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
        return [part.state() if own else None for part, own in self._own_parts()]

    def restore(self, state: Any) -> None:
        for (part, own), saved in zip(self._own_parts(), state, strict=True):
            if own:
                part.restore(saved)

    def _own_parts(self) -> list[tuple[Scorer | Side, bool]]:
        """The parts, and whether each has a memory that is saved with this: not so sides, and what another part has already."""
        return [
            (part, not isinstance(part, Side) and all(part is not earlier for earlier in self.parts[:place]))
            for place, part in enumerate(self.parts)
        ]


def _joined(scorer: Scorer, earlier: list[Scorer]) -> Scorer:
    """The scorer; or an earlier one that scores the same; or one in its place that reads what that remembers."""
    join: Callable[[Scorer], Scorer | None] | None = getattr(scorer, "join", None)
    if join is not None:
        for other in earlier:
            joined = join(other)
            if joined is not None:
                return joined
    return scorer
