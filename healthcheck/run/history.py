"""The last values of every series: for evidence, for charts, and for people who ask."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from healthcheck.core.samples import Sample, series_name

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
