"""``gain``: how much a value that should rise (or, with ``direction: down``, fall) has done so since its first samples, at most.

The whole series is kept as at most ``MOST`` blocks of equal length, each represented by its mean; when they are full, neighbours
are joined. The score is in units of the scatter of single samples and is the larger of two upper bounds: of the trend over all
blocks (Theil-Sen with Sen's interval, as in ``slope``) times the length of the series, and of the best quarter of it less its first
quarter (two-sample bound by the scatter of blocks, which the resemblance of neighbours widens as well). So ``below: 0.5`` reads
"surely less than half a standard deviation of one episode has been gained, and there never was more": a level that was
reached and lost again, or is reached late, is no series without progress.

The scatter is 0.886 times the mean difference of neighbours (that of normal values), which a sparse reward has as well: its median
difference is 0.

Two one-sided tests, of which this is one, are how the absence of an effect is shown (Schuirmann 1987); that returns have to be
compared with their own scatter over episodes: Henderson et al., "Deep Reinforcement Learning That Matters", 2018.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf
from statistics import NormalDist
from typing import Any

from healthcheck.core.protocols import Bound, Condition, ConditionType, Scored
from healthcheck.rulelang.conditions.base import (
    CompiledCondition,
    Found,
    UnboundedScorer,
    choice_schema,
    min_samples_of,
    number_schema,
    options_schema,
    the_comparator,
)
from healthcheck.rulelang.conditions.trends import theil_sen_interval

MOST = 32
"""Blocks, at most; from half as many on neighbours were joined."""
FEWEST = 5
"""Blocks from which on it judges."""
NORMAL = 0.886
"""The standard deviation of normal values over the mean difference of two of them: sqrt(pi) / 2."""


class Gain(UnboundedScorer):
    """Score: the upper bound of what was gained since the first quarter, over the scatter of single samples."""

    __slots__ = (
        "_blocks",
        "_count",
        "_filled",
        "_last",
        "_min_samples",
        "_moved",
        "_score",
        "_sign",
        "_size",
        "_sum",
        "_z",
        "normal",
    )

    def __init__(self, min_samples: int, *, confidence: float, sign: float = 1.0) -> None:
        self.normal: float | None = None
        self._min_samples = min_samples
        self._z = NormalDist().inv_cdf(confidence)
        self._sign = sign
        """-1 for what should fall: the series is judged upside down."""
        self._blocks: list[float] = []
        self._size = 1
        """Samples in a block."""
        self._sum, self._filled = 0.0, 0
        """The sum of the block that is not complete, and its samples."""
        self._count = 0
        self._last = self._moved = 0.0
        """The newest value, and the sum of all differences of neighbours."""
        self._score: float | None = None

    def update(self, values: Sequence[float], steps: Sequence[int], quiet: Bound) -> Sequence[Scored]:
        found: Found = ()
        for value in values:
            if self._count:
                move = value - self._last
                self._moved += move if move > 0.0 else -move
            self._last = value
            count = self._count = self._count + 1
            self._sum += value
            self._filled += 1
            if self._filled == self._size:
                self._complete()
                if count >= self._min_samples and len(self._blocks) >= FEWEST:
                    self._score = self._judge()
            score = self._score
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
        return found

    def _complete(self) -> None:
        blocks = self._blocks
        blocks.append(self._sum / self._size)
        self._sum, self._filled = 0.0, 0
        if len(blocks) == MOST:
            self._blocks = [0.5 * (a + b) for a, b in zip(blocks[::2], blocks[1::2], strict=True)]
            self._size *= 2

    def _judge(self) -> float | None:
        blocks, sign, z = self._blocks, self._sign, self._z
        n = len(blocks)
        quarter = max(2, n // 4)
        scatter = NORMAL * self._moved / (self._count - 1)
        before = self.normal = sum(blocks[:quarter]) / quarter
        if scatter == 0.0:
            return None  # a constant says nothing of what a gain would be worth
        # Seen from the first quarter and the right way up; sums of blocks and of their squares up to each place.
        ys = [sign * (block - before) for block in blocks]
        sums = [0.0, *accumulate(ys)]
        squares = [0.0, *accumulate([y * y for y in ys])]
        own = squares[quarter]
        best = -inf
        # The best quarter, wherever it lies: what was gained and lost is no lack of progress.
        for start in range(quarter, n - quarter + 1):
            end = start + quarter
            total = sums[end] - sums[start]
            spread = own + squares[end] - squares[start] - total * total / quarter
            bound = total / quarter + z * (spread / (quarter * (quarter - 1)) if spread > 0.0 else 0.0) ** 0.5
            if bound > best:
                best = bound
        slopes = [(ys[j] - ys[i]) / (j - i) for i in range(n) for j in range(i + 1, n)]
        slopes.sort()
        bounds = theil_sen_interval(slopes, ys, z)
        trend = bounds[1] * n if bounds is not None else inf
        return (trend if trend > best else best) / scatter

    def state(self) -> Any:
        numbers = [self._size, self._count, self._filled, self._sum, self._last, self._moved]
        return [self._blocks[:], numbers, [self._score, self.normal]]

    def restore(self, state: Any) -> None:
        blocks, (size, count, filled, *sums), (self._score, self.normal) = state
        self._blocks = [float(b) for b in blocks]
        self._size, self._count, self._filled = int(size), int(count), int(filled)
        self._sum, self._last, self._moved = (float(x) for x in sums)


def compile_gain(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "gain")
    confidence = float(options.get("confidence", 0.95))
    min_samples = max(FEWEST, min_samples_of(rule, 1_000_000, default=100))
    sign = -1.0 if options.get("direction", "up") == "down" else 1.0
    return CompiledCondition(
        "gain",
        breaches,
        lambda: Gain(min_samples, confidence=confidence, sign=sign),
        "{series} has gained {score:.2f} of its own scatter at most since its first quarter, {normal}: {threshold}",
        baseline=True,
        min_samples=min_samples,
    )


GAIN = ConditionType(
    "gain",
    options_schema(
        "What a value has gained since its first quarter at most, in units of the scatter of single samples.",
        confidence=number_schema(
            "How sure it must be that no more was gained (0.95).", exclusiveMinimum=0.5, exclusiveMaximum=1
        ),
        direction=choice_schema("Which way is better: `up` (default) or `down`.", "up", "down"),
    ),
    compile_gain,
    help="What should rise has not risen: the most it can have gained, against its own scatter.",
)
