"""The last values of every series: for evidence, for charts, for people who ask, and for alerts on values that exploded."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from healthcheck.core.alerts import Finding
from healthcheck.core.samples import Sample, series_name
from healthcheck.core.text import number, plural

HISTORY = 200
"""Values per series that :class:`History` keeps."""
HISTORY_SERIES = 512


class History:
    """The last values of every series, for evidence and for people who ask.

    Steps and values stand in turn in one deque: a pair for each would be one more thing for the garbage collector
    to count, and a loop that makes nothing of its own that stays would collect because of us.
    """

    def __init__(self) -> None:
        self._kept: dict[str, deque[float]] = {}

    def remember(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            name = sample.metric if not sample.labels else series_name(sample.metric, sample.labels)
            kept = self._kept.get(name)
            if kept is None:
                if len(self._kept) >= HISTORY_SERIES:
                    continue
                kept = self._kept[name] = deque(maxlen=2 * HISTORY)
            kept.extend((sample.step, sample.value))

    def __call__(self, series: str, n: int = HISTORY) -> list[tuple[int, float]]:
        """The last ``n`` values of a series as ``(step, value)``, oldest first."""
        kept = list(self._kept.get(series, ()))
        return list(zip(map(int, kept[::2]), kept[1::2], strict=True))[-n:]

    def series(self) -> list[str]:
        """Names of all series, in the order in which they were first seen."""
        return list(self._kept)

    def newest(self, series: str) -> float | None:
        """The last value of a series; None without any."""
        kept = self._kept.get(series)
        return kept[-1] if kept else None

    def charted(self, leave_out: Iterable[str] = ()) -> dict[str, float]:
        """The newest value of each series without labels that makes a chart.

        What was seen once does not, nor do signs that have been 0 or 1 all along: forty flat lines hide the others.
        """
        out = set(leave_out)
        names = [name for name in self._kept if "[" not in name and name not in out]
        return {name: values[-1] for name in names if _varies(values := list(self._kept[name])[1::2])}


def _varies(values: Sequence[float]) -> bool:
    newest = values[-1] if values else 0.0
    return len(values) > 1 and (newest not in (0.0, 1.0) or any(value != newest for value in values))


# --------------------------------------------------------------------------------------------------
# A value that is not finite because it grew without bound before: then the growth is the story, not the batch of that step.

LOOK_BACK = 50
"""Samples before the alert that are looked at."""
FEWEST = 3
GROWTH = 1e3
"""By how much the last finite value exceeds the first one of these samples."""
RECENT = 10
"""Steps within which the last finite value must lie."""
_EXPLODED = ": it exploded,"


def name_explosion(finding: Finding, history: Callable[[str, int], list[tuple[int, float]]]) -> None:
    """Change message and hint of what was found of a value that grew by a factor of a thousand and then broke.

    :param history: ``history(series, n)``: the last values of a series as (step, value).
    """
    if math.isfinite(finding.value) or not finding.series or _EXPLODED in finding.message:
        return
    before = [(at, abs(value)) for at, value in history(finding.series[0].name, LOOK_BACK) if at < finding.fired_step]
    finite = [(at, value) for at, value in before if math.isfinite(value)]
    if len(finite) < FEWEST or finding.fired_step - finite[-1][0] > RECENT:
        return
    ended, last = finite[-1]
    if last < GROWTH * finite[0][1] or last < max(value for _, value in finite):
        return
    # From the smallest value on: a quiet stretch before it is no part of the story.
    began, first = min(finite, key=lambda sample: (sample[1], -sample[0]))
    finding.message += f"{_EXPLODED} from {number(first)} to {number(last)} in {plural(ended - began, 'step')}"
    finding.hint = "lower the learning rate, warm it up or clip gradients: values grew long before they were not finite"
