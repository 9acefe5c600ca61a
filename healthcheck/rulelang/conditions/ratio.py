"""``ratio``: the value divided by a baseline of the samples before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck.core.protocols import Bound, Condition, ConditionType, Scored
from healthcheck.rulelang.comparators import exact_bound
from healthcheck.rulelang.conditions.base import (
    CompiledCondition,
    Found,
    OptionError,
    choice_schema,
    min_samples_of,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.conditions.learning import Learning
from healthcheck.rulelang.conditions.windows import MomentsWindow, SortedWindow

BASELINES = ("median", "mean", "ewma", "best", "first")


class Ratio:
    """x / baseline. No score while the baseline is not positive: a ratio to it means nothing.

    Each kind of baseline says what it is now, and how it learns: one value, or a new content.
    """

    __slots__ = ("_learning", "_min_samples", "_streak", "normal", "window")

    memoryless = False

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        self.normal: float | None = None
        self.window = window
        self._min_samples = min_samples
        self._learning = learning
        self._streak: list[float] = []

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        found: Found = ()
        for value in values:
            baseline = self._baseline()
            score: float | None = None
            if baseline is not None and baseline > 0.0:
                self.normal = baseline
                score = value / baseline
            if self._learning.plain:
                self._push(value)
            else:
                learnt, afresh = self._learning.admit(value, score, self._streak, self.bound)
                if afresh:
                    self._fill(learnt)
                else:
                    for one in learnt:
                        self._push(one)
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
        return found

    def bound(self, healthy: Bound) -> Bound | None:
        baseline = self._baseline()
        if baseline is None or baseline <= 0.0:
            return None
        level = baseline
        return exact_bound(lambda value: value / level, healthy, healthy.low * level, healthy.high * level)

    def join(self, other: Any) -> Ratio | None:
        """Two ratios to the same baseline, as in ``above: 0.97`` and ``below: 1.03``, are one."""
        alike = type(other) is type(self) and other.window == self.window and other._min_samples == self._min_samples
        return other if alike and self._learning.plain and other._learning.plain else None

    def _baseline(self) -> float | None:
        raise NotImplementedError

    def _push(self, value: float) -> None:
        raise NotImplementedError

    def _fill(self, values: Sequence[float]) -> None:
        raise NotImplementedError

    def _memory(self) -> Any:
        raise NotImplementedError

    def _remember(self, memory: Any) -> None:
        raise NotImplementedError

    def state(self) -> Any:
        return {"memory": self._memory(), "streak": self._streak[:], "normal": self.normal}

    def restore(self, state: Any) -> None:
        self._remember(state["memory"])
        self._streak, self.normal = list(state["streak"]), state["normal"]


class RatioToMedian(Ratio):
    """The usual one: a spike moves the median of a window little."""

    __slots__ = ("_window",)

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        super().__init__(window, min_samples, learning)
        self._window = SortedWindow(window)

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        if not self._learning.plain:
            return super().update(values, steps, quiet)
        window = self._window
        found: Found = ()
        for value in values:
            score: float | None = None
            if len(window.ordered) >= self._min_samples:
                baseline = window.median
                if baseline > 0.0:
                    self.normal = baseline
                    score = value / baseline
            window.push(value)
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
        return found

    def _baseline(self) -> float | None:
        return self._window.median if len(self._window.ordered) >= self._min_samples else None

    def _push(self, value: float) -> None:
        self._window.push(value)

    def _fill(self, values: Sequence[float]) -> None:
        self._window.fill(values)

    def _memory(self) -> Any:
        return list(self._window.values)

    def _remember(self, memory: Any) -> None:
        self._window.fill(memory)


class RatioToMean(Ratio):
    __slots__ = ("_window",)

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        super().__init__(window, min_samples, learning)
        self._window = MomentsWindow(window)

    def _baseline(self) -> float | None:
        return self._window.mean if len(self._window) >= self._min_samples else None

    def _push(self, value: float) -> None:
        self._window.push(value)

    def _fill(self, values: Sequence[float]) -> None:
        self._window.fill(values)

    def _memory(self) -> Any:
        return self._window.state()

    def _remember(self, memory: Any) -> None:
        self._window.restore(memory)


class RatioToEwma(Ratio):
    """Exponential mean with weight 2 / (window + 1), started at the plain mean of the first samples."""

    __slots__ = ("_count", "_mean", "_weight")

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        super().__init__(window, min_samples, learning)
        self._weight = 2.0 / (window + 1.0)
        self._mean, self._count = 0.0, 0

    def _baseline(self) -> float | None:
        return self._mean if self._count >= self._min_samples else None

    def _push(self, value: float) -> None:
        self._count += 1
        self._mean += max(self._weight, 1.0 / self._count) * (value - self._mean)

    def _fill(self, values: Sequence[float]) -> None:
        self._mean, self._count = 0.0, 0
        for value in values:
            self._push(value)

    def _memory(self) -> Any:
        return [self._mean, self._count]

    def _remember(self, memory: Any) -> None:
        self._mean, self._count = float(memory[0]), int(memory[1])


class RatioToBest(Ratio):
    """Best of all samples so far, or of the last ``window`` where one is given."""

    __slots__ = ("_best", "_count", "_largest", "_window")

    def __init__(self, window: int, min_samples: int, learning: Learning, *, largest: bool) -> None:
        super().__init__(window, min_samples, learning)
        self._largest = largest
        self._window = SortedWindow(window) if window else None
        self._best, self._count = 0.0, 0

    def join(self, other: Any) -> Ratio | None:
        return super().join(other) if getattr(other, "_largest", None) == self._largest else None

    def _baseline(self) -> float | None:
        if self._window is not None:
            if len(self._window) < self._min_samples:
                return None
            return self._window.ordered[-1 if self._largest else 0]
        return self._best if self._count >= self._min_samples else None

    def _push(self, value: float) -> None:
        if self._window is not None:
            self._window.push(value)
        elif not self._count or (value > self._best) == self._largest:
            self._best = value
        self._count += 1

    def _fill(self, values: Sequence[float]) -> None:
        self._count = 0
        if self._window is not None:
            self._window.fill(())
        for value in values:
            self._push(value)

    def _memory(self) -> Any:
        return [self._best, self._count, list(self._window.values) if self._window is not None else None]

    def _remember(self, memory: Any) -> None:
        self._best, self._count = float(memory[0]), int(memory[1])
        if self._window is not None:
            self._window.fill(memory[2] or ())


class RatioToFirst(Ratio):
    """Median of the first ``min_samples`` samples; it never changes afterwards."""

    __slots__ = ("_first", "memoryless")

    def __init__(self, window: int, min_samples: int, learning: Learning) -> None:
        super().__init__(window, min_samples, learning)
        self._first = SortedWindow(min_samples)
        self.memoryless = False

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        if not self.memoryless:
            return super().update(values, steps, quiet)
        level = self.normal = self._first.median
        found: Found = ()
        for value in values:
            score = value / level
            if found:
                found.append((score, level))
            elif not quiet.low <= score <= quiet.high:
                found = [(score, level)]
        return found

    def _baseline(self) -> float | None:
        return self._first.median if len(self._first.ordered) >= self._min_samples else None

    def _push(self, value: float) -> None:
        if len(self._first) < self._min_samples:
            self._first.push(value)
            self._settle()

    def _fill(self, values: Sequence[float]) -> None:
        self._first.fill(values)
        self._settle()

    def _settle(self) -> None:
        """Whether there is a level that a ratio can be taken to, and nothing is left to learn."""
        first = self._first
        self.memoryless = self._learning.plain and len(first) >= self._min_samples and first.median > 0.0

    def _memory(self) -> Any:
        return list(self._first.values)

    def _remember(self, memory: Any) -> None:
        self._fill(memory)


def compile_ratio(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "ratio")
    to = options.get("to", "median")
    endless = to in ("best", "first") and "window" not in options
    window = sample_count(options, "window", 200, least=1)
    default = 1 if to in ("best", "first") else 8
    min_samples = min_samples_of(rule, 1_000_000 if endless else window, default=default)
    outliers = "clip" if to in ("mean", "ewma") else "include"
    learning = Learning(rule, breaches, default=outliers, window=window)
    mode = options.get("mode")
    if mode and to != "best":
        raise OptionError("`mode` only means something with `to: best`", "mode")
    if to == "best" and mode is None and breaches.direction == 0:
        raise OptionError("say which value is best: `mode: min` or `mode: max`", "to")
    largest = mode == "max" if mode else breaches.direction < 0
    makers = {"median": RatioToMedian, "mean": RatioToMean, "ewma": RatioToEwma, "first": RatioToFirst}

    def make() -> Ratio:
        if to == "best":
            return RatioToBest(0 if endless else window, min_samples, learning, largest=largest)
        return makers[to](window, min_samples, learning)

    return CompiledCondition(
        "ratio",
        breaches,
        make,
        f"{{series}} {{value}} is {{score:.2f}} times its {'recent ' if not endless else ''}{to} {{normal}}",
        bounded=breaches.exact,
        baseline=True,
        min_samples=min_samples,
        window=0 if endless else window,
    )


RATIO = ConditionType(
    "ratio",
    options_schema(
        "x / baseline of the samples before x. Not judged while the baseline is zero or negative.",
        to=choice_schema("Baseline: median (default), mean, ewma, best so far, or the first samples.", *BASELINES),
        mode=choice_schema(
            "With `to: best`: which value is best. Default: max for below, min for above.", "min", "max"
        ),
        window=window_schema(least=1),
    ),
    compile_ratio,
    help="The value divided by a baseline of the samples before it.",
)
