"""``ratio``: the value divided by a baseline of the samples before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthcheck.protocols import Condition, ConditionType
from healthcheck.rulelang.conditions.base import (
    Compiled,
    OptionError,
    choice_schema,
    min_samples_of,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.conditions.baselines import (
    Ratio,
    RatioToEwma,
    RatioToMean,
    RatioToMedian,
)
from healthcheck.rulelang.conditions.landmarks import RatioToBest, RatioToFirst
from healthcheck.rulelang.conditions.learning import Learning

BASELINES = ("median", "mean", "ewma", "best", "first")


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
    if to == "best" and mode is None and breaches.kind in ("equals", "outside"):
        raise OptionError("say which value is best: `mode: min` or `mode: max`", "to")
    largest = mode == "max" if mode else breaches.high is None
    makers = {"median": RatioToMedian, "mean": RatioToMean, "ewma": RatioToEwma, "first": RatioToFirst}

    def make() -> Ratio:
        if to == "best":
            return RatioToBest(0 if endless else window, min_samples, learning, largest=largest)
        return makers[to](window, min_samples, learning)

    return Compiled(
        "ratio",
        breaches,
        make,
        f"{{series}} {{value}} is {{score:.2f}} times its {'recent ' if not endless else ''}{to} {{normal}}",
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
