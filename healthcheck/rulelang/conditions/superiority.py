"""``superiority``: how likely a sample of the best later quarter is better than one of the first quarter, by ranks.

The probability of superiority, P(later > first) + P(equal) / 2, of Mann and Whitney: 0.5 where nothing has changed, 1 where each later
sample is better. It asks for no scale and no shape of the noise, so that rewards with a few enormous values, many ties or two humps are
compared like any others (Vargha and Delaney, "A critique and improvement of the CL common language effect size statistics", 2000;
for returns of agents: Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical Precipice", 2021, arXiv:2108.13264).
The score is the highest of it over all quarters after the first one: a level that was reached and lost is no lack of progress.

The whole series is kept as at most ``MOST`` blocks of equal length, of each at most ``KEPT`` samples; when the blocks are full,
neighbours are joined and every other sample is left out.

Averages over the last episodes resemble their neighbours, and a thousand of them may be ten episodes. What counts are independent
samples: their number is estimated by the ratio of the mean difference of neighbours to that of any two samples (Gini's), squared,
which is 1 for independent samples of any distribution (the ratio of von Neumann, 1941, with sizes in place of squares).

Where most samples are alike (a reward of 0 that is 1 at the goal) ranks say little: what counts is when the better ones came. Were they
no more frequent than before, their places would be anywhere in the run; their mean place, in its standard deviations, is the trend test
of Laplace for rare events (Cox and Lewis, The Statistical Analysis of Series of Events, 1966). Better ones that came late are progress.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from healthcheck.core.protocols import Bound, Condition, ConditionType, Scored
from healthcheck.rulelang.conditions.base import (
    CompiledCondition,
    Found,
    UnboundedScorer,
    choice_schema,
    min_samples_of,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)

MOST, KEPT = 32, 16
"""Blocks at most, from half as many on neighbours were joined; samples kept of a block."""
FEWEST = 16
"""Samples from which on it judges."""
PLAIN = 0.7
"""From here on it is better, however alike neighbours are."""
RARE = 0.8
"""Of all samples, from which on they are alike and better ones are rare events."""
LATE = 1.28
"""Standard deviations by which rare events come late on the whole: one series of ten that have no trend does."""


class Superiority(UnboundedScorer):
    """Score: the highest probability that a sample of a later quarter is better than one of the first."""

    __slots__ = (
        "_blocks",
        "_count",
        "_filled",
        "_independent",
        "_last",
        "_min_samples",
        "_moved",
        "_score",
        "_sign",
        "_size",
        "_stride",
        "normal",
    )

    def __init__(self, min_samples: int, independent: int, sign: float = 1.0) -> None:
        self.normal: float | None = None
        self._min_samples, self._independent, self._sign = min_samples, independent, sign
        self._blocks: list[list[float]] = []
        """The last one is being filled."""
        self._size = self._stride = 1
        """Samples of a block, and how many of them lie between two that are kept, and one."""
        self._filled = self._count = 0
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
            self._count += 1
            if not self._filled:
                self._blocks.append([])
            if self._filled % self._stride == 0:
                self._blocks[-1].append(value)
            self._filled += 1
            if self._filled == self._size:
                self._filled = 0
                if len(self._blocks) == MOST:
                    self._join()
                if self._count >= self._min_samples:
                    self._score = self._judge()
            score = self._score
            if found:
                found.append((score, self.normal))
            elif score is None or not quiet.low <= score <= quiet.high:
                found = [(score, self.normal)]
        return found

    def _join(self) -> None:
        pairs = zip(self._blocks[::2], self._blocks[1::2], strict=True)
        self._blocks = [[*one, *other] for one, other in pairs]
        self._size *= 2
        if self._size // self._stride > KEPT:
            self._stride *= 2
            self._blocks = [block[::2] for block in self._blocks]

    def _judge(self) -> float | None:
        blocks, n = self._blocks, len(self._blocks)
        quarter = n // 4
        kept = sorted(value for block in blocks for value in block)
        many = len(kept)
        # Gini's mean difference: each value counts as often as it is the larger one of a pair, less as often as the smaller.
        pairs = many * (many - 1) / 2
        usual = sum((2 * i - many + 1) * value for i, value in enumerate(kept)) / pairs
        if usual <= 0.0:
            return None  # a constant: no sample is better than another one, and none could show it
        first = sorted(value for block in blocks[:quarter] for value in block)
        self.normal = first[len(first) // 2]
        if self._rare_and_late(kept):
            return None
        # Of each later block: how many pairs with the first quarter are won, ties half.
        won = [
            sum(bisect_left(first, value) + bisect_right(first, value) for value in block) for block in blocks[quarter:]
        ]
        per_quarter = 2 * len(first) * quarter * len(blocks[0])
        total = best = sum(won[:quarter])
        for gone, come in zip(won, won[quarter:], strict=False):
            total += come - gone
            if (total > best) == (self._sign > 0.0):
                best = total
        share = best / per_quarter if self._sign > 0.0 else 1.0 - best / per_quarter
        # A rise makes neighbours alike as well: only the lack of one needs many samples to be seen.
        independent = self._count * min(1.0, self._moved / (self._count - 1) / usual) ** 2
        return share if share >= PLAIN or independent >= self._independent else None

    def _rare_and_late(self, ordered: Sequence[float]) -> bool:
        """Whether most samples are alike, and better ones come late."""
        usual = ordered[len(ordered) // 2]
        low, high = bisect_left(ordered, usual), bisect_right(ordered, usual)
        if high - low < RARE * len(ordered):
            return False
        places = [at for at, block in enumerate(self._blocks) for value in block if (value - usual) * self._sign > 0.0]
        if not places:
            return False
        late = sum(places) / len(places) / (len(self._blocks) - 1) - 0.5
        return bool(late * (12.0 * len(places)) ** 0.5 >= LATE)

    def state(self) -> Any:
        numbers = [self._size, self._stride, self._filled, self._count]
        return [[block[:] for block in self._blocks], numbers, [self._last, self._moved], [self._score, self.normal]]

    def restore(self, state: Any) -> None:
        blocks, numbers, (self._last, self._moved), (self._score, self.normal) = state
        self._blocks = [[float(value) for value in block] for block in blocks]
        self._size, self._stride, self._filled, self._count = (int(x) for x in numbers)


def compile_superiority(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "superiority")
    min_samples = max(FEWEST, min_samples_of(rule, 1_000_000, default=100))
    independent = sample_count(options, "independent", min_samples // 2, least=0)
    sign = -1.0 if options.get("direction", "up") == "down" else 1.0
    return CompiledCondition(
        "superiority",
        breaches,
        lambda: Superiority(min_samples, independent, sign),
        "a sample of the best later quarter of {series} is better than one of the first with probability {score:.2f}: {threshold}",
        baseline=True,
        min_samples=min_samples,
    )


SUPERIORITY = ConditionType(
    "superiority",
    options_schema(
        "The probability that a sample of the best later quarter is better than one of the first quarter (0.5: no progress).",
        independent=window_schema(
            "Samples worth independent ones that must be there before it says that nothing is better (half of `min_samples`).",
            least=0,
        ),
        direction=choice_schema("Which way is better: `up` (default) or `down`.", "up", "down"),
    ),
    compile_superiority,
    help="Whether later samples are better than the first ones, by ranks: for rewards of any distribution.",
)
