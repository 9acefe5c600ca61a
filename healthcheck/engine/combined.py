"""``all`` and ``any``: conditions made of parts, each with its own memory and maybe its own metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from healthcheck.engine.series import NOTHING_IS_QUIET
from healthcheck.protocols import Comparator, Condition, Promise, Scorer, Skim
from healthcheck.rulelang.rule import Selector

if TYPE_CHECKING:
    from healthcheck.engine.backlog import Backlog

Learn = Callable[[float, int], bool]


class Side:
    """One part that watches another metric; shared by all series of its rule.

    It is asked far less often than its metric has values, so it looks at them when it is.
    """

    __slots__ = (
        "_breach", "_is_value", "_quiet", "_seen", "_test", "backlogs", "condition", "scorer", "selector",
    )  # fmt: skip

    def __init__(self, selector: Selector, condition: Condition) -> None:
        self.selector = selector
        self.condition = condition
        self.scorer = condition.start()
        self.backlogs: list[Backlog] = []
        """Where values of the series that it watches are kept."""
        self._seen = 0
        """How many of them it has looked at."""
        self._breach: bool | None = None
        self._is_value = bool(getattr(self.scorer, "is_identity", False))
        self._test = condition.breaches
        self._quiet = _quiet(condition.breaches)

    @property
    def breach(self) -> bool | None:
        """Whether the newest value breaches; None before the first score."""
        for backlog in self.backlogs:
            if len(backlog.values) > self._seen:
                self._look(backlog.values[self._seen :], backlog.steps[self._seen :])
                self._seen = len(backlog.values)
        return self._breach

    def catch_up(self, values: Sequence[float], steps: Sequence[int]) -> None:
        """Look at all that were kept: they are handed out now."""
        if len(values) > self._seen:
            self._look(values[self._seen :], steps[self._seen :])
        self._seen = 0

    def _look(self, values: Sequence[float], steps: Sequence[int]) -> None:
        first = len(values) - 1 if getattr(self.scorer, "forgetful", False) else 0
        for at in range(first, len(values)):
            self.feed(values[at], steps[at])

    def feed(self, value: float, step: int) -> None:
        """Take a value of a series that the selector matches."""
        if value - value != 0.0 and not self.condition.judges_nonfinite:
            self._breach = True  # non-finite breaches every numeric condition
            return
        score = value if self._is_value else self.scorer.update(value, step)
        if score is not None:
            low, high = self._quiet
            self._breach = not low < score < high and self._test(score)

    def state(self) -> Any:
        return {"breach": self.breach, "scorer": self.scorer.state()}

    def restore(self, state: Any) -> None:
        self._breach = state["breach"]
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
        self._outlooks = [(getattr(s, "foresee", None), _quiet(test)) for s, test, learn in judging if learn is None]
        self._skims: list[Skim | None] = [getattr(s, "skim", None) for s, _, _ in judging]

    def foresee(self, last: float, low: float, high: float) -> Promise | None:
        """As long as one part of an ``all``, or every part of an ``any``, cannot breach.

        Parts on another metric make no promise, since their values come from elsewhere. Where they do not matter,
        they are counted as they stand when the values are learnt: the closest approach may be a little off.
        """
        if self._sides and not self.need_all:
            return None
        promises = [
            foresee(last, *quiet) if foresee is not None and quiet[0] < quiet[1] else None
            for foresee, quiet in self._outlooks
        ]
        if self.need_all:
            made = [p for p in promises if p is not None and p[0] < last < p[1]]
            return max(made, key=_length, default=None)
        if self._lazy or None in promises:
            return None
        known = [p for p in promises if p is not None]
        return max(p[0] for p in known), min(p[1] for p in known), min(p[2] for p in known)

    @property
    def blank(self) -> bool:
        """Whether nothing can be said before another metric has its first value."""
        return self.need_all and any(not side.backlogs and side.breach is None for side in self._sides)

    def skim(self, values: Sequence[float], steps: Sequence[int], low: float, high: float) -> int:
        """Foreseen values: parts that are only learnt from, and that do not count, need no call for each of them.

        Of an ``all`` at least one prompt part fails, and then lazy parts are not asked; of an ``any`` all do.
        """
        most = len(self._prompt) + len(self._sides) - 1 if self.need_all else 0
        if None in self._skims or (most > high and not self.blank):
            return 0
        for skim in self._skims:
            at = 0
            while skim is not None and at < len(values):
                at += skim(values[at : at + 64], steps[at : at + 64], -inf, inf)
        return len(values)

    def update(self, value: float, step: int) -> float | None:
        breaches = unknown = 0
        for side in self._sides:
            breach = side.breach
            if breach is None:
                unknown += 1
            elif breach:
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


def _length(promise: Promise) -> int:
    return promise[2]


def _quiet(test: Comparator) -> tuple[float, float]:
    """The scores between which a comparator is false, so that it need not be called."""
    quiet: tuple[float, float] = getattr(test, "quiet", NOTHING_IS_QUIET)
    return quiet
