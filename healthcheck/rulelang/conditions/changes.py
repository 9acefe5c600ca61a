"""Conditions on how a value moves from sample to sample: ``delta``, ``increase``, ``no_improvement``, ``unchanged``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck.core.protocols import Bound, Condition, ConditionType, Scored
from healthcheck.rulelang.comparators import Threshold
from healthcheck.rulelang.conditions.base import (
    QUANTITY,
    CompiledCondition,
    Found,
    OptionError,
    UnboundedScorer,
    choice_schema,
    flag_schema,
    min_samples_of,
    number_schema,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.quantities import QuantityError, parse_quantity


class Delta(UnboundedScorer):
    """x minus the value ``over`` samples earlier; with ``relative`` divided by that value's size."""

    __slots__ = ("_past", "_relative", "normal")

    def __init__(self, over: int, relative: bool) -> None:
        self.normal: float | None = None
        self._past: deque[float] = deque(maxlen=over)
        self._relative = relative

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        past = self._past
        found: Found = ()
        for value in values:
            score: float | None = None
            if len(past) == past.maxlen:
                before = self.normal = past[0]
                score = value - before
                if self._relative:
                    score = score / abs(before) if before else None
            past.append(value)
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
        return found

    def state(self) -> Any:
        return [list(self._past), self.normal]

    def restore(self, state: Any) -> None:
        past, self.normal = state
        self._past.clear()
        self._past.extend(past)


class Increase(UnboundedScorer):
    """Growth of a counter over the window. A counter that fell was reset and starts from zero."""

    __slots__ = ("_growth", "_last", "_min_samples", "_size", "_total")

    def __init__(self, window: int, min_samples: int) -> None:
        self._growth: deque[float] = deque(maxlen=window)
        self._size = window
        self._last: float | None = None
        self._total = 0.0
        self._min_samples = min_samples

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        growth, last = self._growth, self._last
        n = len(growth)
        found: Found = ()
        for value in values:
            if last is None:
                last = value
                found = found or []
                found.append((None, None))
                continue
            # A counter that fell was reset: what it shows now has grown since.
            grown = value - last if value >= last else max(value, 0.0)
            last = value
            gone = 0.0
            if n == self._size:
                gone = growth[0]
            else:
                n += 1
            growth.append(grown)
            # Subtracting what left is exact for counters; anything else is summed afresh.
            exact = grown.is_integer() and gone.is_integer()
            total = self._total = self._total + grown - gone if exact else sum(growth)
            if n + 1 < self._min_samples:
                found = found or []
                found.append((None, None))
            elif found:
                found.append((total, None))
            elif not quiet.low <= total <= quiet.high:
                found = [(total, None)]
        self._last = last
        return found

    def state(self) -> Any:
        return [list(self._growth), self._last, self._total]

    def restore(self, state: Any) -> None:
        self._growth.clear()
        self._growth.extend(float(v) for v in state[0])
        self._last = state[1]
        self._total = float(state[2])


class NoImprovement(UnboundedScorer):
    """Score: samples since the best value was last beaten by more than the wanted margin."""

    __slots__ = ("_down", "_min_abs", "_min_rel", "_recent", "_since", "_smooth", "normal")

    def __init__(self, *, down: bool, min_rel: float, min_abs: float, smooth: int) -> None:
        self.normal: float | None = None
        self._down = down
        self._min_rel, self._min_abs = min_rel, min_abs
        self._recent: deque[float] = deque(maxlen=smooth)
        self._smooth = smooth
        self._since = 0.0

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        best, since = self.normal, self._since
        found: Found = ()
        for value in values:
            level = value
            if self._smooth > 1:
                recent = self._recent
                recent.append(value)
                if len(recent) < self._smooth:
                    found = found or []
                    found.append((None, None))
                    continue
                level = sum(recent) / self._smooth
            if best is None:
                best = level
                found = found or []
                found.append((None, best))
                continue
            gain = best - level if self._down else level - best
            # Both margins must be beaten: the relative one is nothing where the best value is zero.
            if gain > self._min_abs and gain > self._min_rel * abs(best):
                best = level
                since = 0.0
            else:
                since += 1.0
            if found:
                found.append((since, best))
            elif not quiet.low <= since <= quiet.high:
                found = [(since, best)]
        self.normal, self._since = best, since
        return found

    def state(self) -> Any:
        return [self.normal, self._since, list(self._recent)]

    def restore(self, state: Any) -> None:
        self.normal, self._since = state[0], float(state[1])
        self._recent.clear()
        self._recent.extend(state[2])


NEARLY = 0.9
"""Of what was gained since the first value, from which on a value stands at its best."""


class Unchanged(UnboundedScorer):
    """Score: how many samples in a row were equal, bit for bit, to the one before them.

    :param times: a run counts once it is so many times as long as the longest one before it; 0: always. A value that is
        computed now and then and logged more often than that (an average over finished episodes, at each step) stands still
        in between.
    :param within: share of the first value; what lies so near to it counts as equal to it.
    :param better: 1 if higher is better, -1 if lower is: what stays at (nearly) its best, having been worse, does not count; 0: all does.
    :param sparse: how many times fewer samples count while nothing has come but a first value of 0 or a negative whole number: a
        reward that is given at a goal, or a cost of each step until the time is up, stands still until the goal is found.
    """

    __slots__ = ("_best", "_better", "_first", "_last", "_longest", "_run", "_sparse", "_times", "_within", "normal")

    def __init__(self, times: float = 0.0, within: float = 0.0, better: int = 0, sparse: float = 1.0) -> None:
        self.normal: float | None = None
        self._times, self._within, self._better, self._sparse = times, within, better, sparse
        self._first = self._best = 0.0
        """The first value, and the best one."""
        self._last: float | None = None
        self._run = self._longest = 0.0
        """The run at hand, and the longest one that is over."""

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        last, run, times = self._last, self._run, self._times
        found: Found = ()
        for value in values:
            if last is None:
                self._first = self._best = value
                if value > 0.0 or value % 1.0:
                    self._sparse = 1.0
                found = found or []
                found.append((None, None))
            else:
                if value == last or (self._within and self._near(value) and self._near(last)):
                    run += 1.0
                else:
                    if run > self._longest:
                        self._longest = run
                    run, self._sparse = 0.0, 1.0
                score = run / self._sparse if run >= times * self._longest else 0.0
                if self._better and self._at_its_best(value):
                    score = 0.0
                if found:
                    found.append((score, last))
                elif not quiet.low <= score <= quiet.high:
                    found = [(score, last)]
                self.normal = last
            last = value
        self._last, self._run = last, run
        return found

    def state(self) -> Any:
        return [self._last, self._run, self.normal, self._longest, self._first, self._best, self._sparse]

    def restore(self, state: Any) -> None:
        self._last, self._run, self.normal = state[0], float(state[1]), state[2]
        self._longest, self._first, self._best, self._sparse = (float(x) for x in state[3:])

    def _near(self, value: float) -> bool:
        return abs(value - self._first) <= self._within * abs(self._first)

    def _at_its_best(self, value: float) -> bool:
        if (value - self._best) * self._better > 0.0:
            self._best = value
        gained = (self._best - self._first) * self._better
        return gained > 0.0 and (value - self._first) * self._better >= NEARLY * gained and not self._near(value)


def compile_delta(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "delta")
    over = sample_count(options, "over", 1)
    relative = bool(options.get("relative", False))
    what = "{score:.1%}" if relative else "{score:.4g}"
    return CompiledCondition(
        "delta",
        breaches,
        lambda: Delta(over, relative),
        f"{{series}} {{value}} changed by {what} over {over} samples",
        min_samples=over + 1,
        window=over,
    )


def compile_increase(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "increase")
    window = sample_count(options, "window", 100)
    min_samples = max(2, min_samples_of(rule, window + 1, default=2))
    return CompiledCondition(
        "increase",
        breaches,
        lambda: Increase(window, min_samples),
        "{series} grew by {score:.4g} over {window} samples",
        min_samples=min_samples,
        window=window,
    )


def compile_no_improvement(options: Any, rule: Mapping[str, Any]) -> Condition:
    over = sample_count(options, "over", 1000)
    try:
        min_rel = parse_quantity(options.get("min_rel", 0.0))
    except QuantityError as error:
        raise OptionError(str(error), "min_rel") from None
    try:
        min_abs = parse_quantity(options.get("min_abs", 0.0))
    except QuantityError as error:
        raise OptionError(str(error), "min_abs") from None
    if min_rel < 0 or min_abs < 0:
        raise OptionError("a margin cannot be negative", "min_rel" if min_rel < 0 else "min_abs")
    smooth = sample_count(options, "smooth", 1)
    down = options.get("mode", "min") == "min"
    return CompiledCondition(
        "no_improvement",
        Threshold("at_least", over, f"no improvement in {over} samples"),
        lambda: NoImprovement(down=down, min_rel=min_rel, min_abs=min_abs, smooth=smooth),
        "{series} {value} has not improved on {normal} for {score:,.0f} samples",
        min_samples=2,
        window=over,
    )


def compile_unchanged(options: Any, rule: Mapping[str, Any]) -> Condition:
    if options is False:
        raise OptionError("`unchanged: false` checks nothing; to switch the rule off write `rule-id: off`")
    over = sample_count(options, "over", 1) if isinstance(options, Mapping) else 1
    times, within, better, sparse = 0.0, 0.0, 0, 1.0
    if isinstance(options, Mapping):
        times, sparse = float(options.get("times", 0.0)), float(options.get("sparse", 1.0))
        try:
            within = parse_quantity(options.get("within", 0.0))
        except QuantityError as error:
            raise OptionError(str(error), "within") from None
        better = {"min": -1, "max": 1}.get(str(options.get("best", "")), 0)
    return CompiledCondition(
        "unchanged",
        Threshold("at_least", over, f"unchanged for {over} sample{'s' if over != 1 else ''}"),
        lambda: Unchanged(times, within, better, sparse),
        "{series} has been exactly {value} for {score:,.0f} samples more",
        min_samples=2,
        window=over,
    )


DELTA = ConditionType(
    "delta",
    options_schema(
        "Change over `over` samples.",
        over=window_schema("How many samples to look back (1).", least=1),
        relative=flag_schema("Divide the change by the size of the earlier value: 0.1 is 10 %."),
    ),
    compile_delta,
    help="Change of the value over `over` samples.",
)

INCREASE = ConditionType(
    "increase",
    options_schema(
        "Growth of a counter over the window; a reset to a smaller value starts from zero.",
        window=window_schema("Samples to look back.", least=1),
    ),
    compile_increase,
    help="Growth of a counter over the window; tolerates resets.",
)

NO_IMPROVEMENT = ConditionType(
    "no_improvement",
    options_schema(
        "The best value has not been beaten for `over` samples.",
        compare=False,
        required=("over",),
        over=window_schema("Samples without improvement that breach.", least=1),
        min_rel={"description": "Improvement that counts, as a share of the best value (0).", "allOf": [QUANTITY]},
        min_abs={"description": "Improvement that counts, in the metric's unit (0).", "allOf": [QUANTITY]},
        mode=choice_schema("Whether lower (`min`, default) or higher (`max`) is better.", "min", "max"),
        smooth=window_schema(
            "Judge the mean of this many samples, so that one lucky value is not the best (1).", least=1
        ),
    ),
    compile_no_improvement,
    help="The best value has not been beaten for `over` samples.",
)

UNCHANGED = ConditionType(
    "unchanged",
    {
        **options_schema(
            "The value is bit for bit the same as before, `over` samples in a row.",
            compare=False,
            over=window_schema("Samples in a row that equal the one before them (1).", least=1),
            times=number_schema(
                "The run must be so many times as long as the longest one before it (0): what is logged more often than it "
                "is computed stands still in between.",
                minimum=0,
            ),
            within={
                "description": "What lies so near to the first value, as a share of it, counts as equal to it (0).",
                "allOf": [QUANTITY],
            },
            best=choice_schema(
                "Which way is better: what stays at its best, having been worse, is no breach (none).", "min", "max"
            ),
            sparse=number_schema(
                "So many times as many samples it takes while nothing has come but a first value of 0 or a negative whole "
                "number (1): a reward that is given at a goal stands still until it is found.",
                minimum=1,
            ),
        ),
        "type": ["object", "boolean"],
    },
    compile_unchanged,
    help="The value is bit for bit the same as before.",
    shorthand=True,
)
