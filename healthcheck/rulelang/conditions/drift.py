"""``drift``: a lasting change of level or a slow divergence, too small to be a spike.

The Page-Hinkley test (Page, "Continuous inspection schemes", 1954; Hinkley, "Inference about the
change-point from cumulative sum tests", 1971): what is left of each value after subtracting the
usual level and a slack is added up, never below zero, and the sum is the score. Values are first
standardised by the median and MAD of a window before them and cut at ``clip``, so that the sum
measures persistence and one spike cannot raise the alarm alone.

The baseline lags ``lag`` samples behind: a slow ramp must not be learnt before it is judged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from healthcheck.protocols import Condition, ConditionType
from healthcheck.rulelang.conditions.base import (
    Compiled,
    OptionError,
    choice_schema,
    min_samples_of,
    number_schema,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.conditions.smallsample import widening_mad
from healthcheck.rulelang.conditions.windows import MAD_TO_SIGMA, SortedWindow

FLOOR = 0.001
CLIP = 4.0


class Drift:
    """Score: the Page-Hinkley sum, in sigmas."""

    __slots__ = ("_cap", "_lag", "_min_samples", "_sign", "_slack", "_sum", "_waiting", "_window", "normal")

    def __init__(self, window: int, min_samples: int, *, lag: int, slack: float, sign: float, cap: float) -> None:
        self.normal: float | None = None
        self._window = SortedWindow(window)
        self._waiting: deque[float] = deque()
        self._min_samples = min_samples
        self._lag = lag
        self._slack = slack
        self._sign = sign
        self._cap = cap
        self._sum = 0.0

    def update(self, value: float, step: int) -> float | None:
        window = self._window
        score: float | None = None
        n = len(window)
        if n >= self._min_samples:
            center, mad = window.center_and_mad()
            self.normal = center
            scale = max(MAD_TO_SIGMA * mad, FLOOR * abs(center)) * widening_mad(n)
            away = self._sign * (value - center)
            z = max(-CLIP, min(CLIP, away / scale)) if scale > 0.0 else (CLIP if away > 0.0 else -CLIP if away else 0.0)
            # Capped, so that a rule can clear in bounded time after the level is normal again.
            score = self._sum = min(max(0.0, self._sum + z - self._slack), self._cap)
        self._waiting.append(value)
        if len(self._waiting) > self._lag:
            window.push(self._waiting.popleft())
        return score

    def state(self) -> Any:
        return [list(self._window.values), list(self._waiting), self._sum]

    def restore(self, state: Any) -> None:
        self._window.fill(state[0])
        self._waiting = deque(state[1])
        self._sum = float(state[2])


def compile_drift(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "drift")
    if breaches.high is None or breaches.low is not None or breaches.high <= 0:
        raise OptionError("the drift score is a sum that grows from zero; compare it with `above: ...`, such as 25")
    window = sample_count(options, "window", 100, least=4)
    lag = sample_count(options, "lag", max(1, window // 4), least=0)
    min_samples = max(4, min_samples_of(rule, window))
    slack = float(options.get("slack", 1.0))
    sign = 1.0 if options.get("direction", "up") == "up" else -1.0
    cap = 2.0 * breaches.high
    return Compiled(
        "drift",
        breaches,
        lambda: Drift(window, min_samples, lag=lag, slack=slack, sign=sign, cap=cap),
        f"{{series}} {{value}} drifts {'up' if sign > 0 else 'down'} from {{normal}}: accumulated {{score:.1f}} sigmas, {{threshold}}",
        baseline=True,
        min_samples=min_samples,
        window=window,
    )


DRIFT = ConditionType(
    "drift",
    options_schema(
        "Page-Hinkley sum of robustly standardised values: slow divergence and lasting changes of level.",
        window=window_schema("Samples of the baseline, at most.", least=4),
        lag=window_schema("How many samples the baseline stays behind the value (a quarter of the window).", least=0),
        slack=number_schema(
            "Sigmas that are subtracted from every value: drifts smaller than this are accepted (1).", minimum=0
        ),
        direction=choice_schema("`up` (default) or `down`.", "up", "down"),
    ),
    compile_drift,
    help="A lasting change of level, or slow divergence.",
)
