"""Stale training losses in result tables.

The HuggingFace Trainer writes one row per evaluation, with the training loss that it *logged* last. If
it logs more rarely than it evaluates, values repeat: "No log", 2.31, 0.72, 0.66, 0.63, 0.63, 0.61. With
logging every L steps, a row at step s shows the log of floor(s / L) * L, so the repeats stand where
floor(s / L) has not grown. A repeat is dropped only if one L explains the whole table; 0.0 and NaN are
never dropped, and a loss that does not move at all is kept: that is a finding, not a repeat.
"""

from __future__ import annotations

from collections.abc import Sequence

_NICE = tuple(m * 10**e for e in range(6) for m in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7.5, 8))


def stale_rows(steps: Sequence[float], losses: Sequence[float | None]) -> tuple[set[int], int]:
    """Indices of rows whose training loss is a repeat, and the logging interval that explains them."""
    best: set[int] = set()
    interval = 0
    distinct = len({v for v in losses if v is not None})
    leading = next((i for i, v in enumerate(losses) if v is not None), len(losses))
    if distinct < (2 if leading else 3):
        return best, interval
    for every in sorted({int(n) for n in _NICE if n == int(n)}):
        stale = _explained(steps, losses, every, leading)
        if stale is not None and len(stale) > len(best):
            best, interval = stale, every
    return {i for i in best if losses[i] not in (0.0,) and losses[i] == losses[i]}, interval


def _explained(steps: Sequence[float], losses: Sequence[float | None], every: int, leading: int) -> set[int] | None:
    """Rows that must repeat with this interval; ``None`` if the table says otherwise."""
    stale: set[int] = set()
    for i, step in enumerate(steps):
        if leading and (step < every) != (i < leading):
            return None
        if i > leading and step // every == steps[i - 1] // every:
            if losses[i] != losses[i - 1]:
                return None
            stale.add(i)
    return stale
