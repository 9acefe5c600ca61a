"""When a probe that has met nothing of its kind is asked again."""

from __future__ import annotations

SETTLED = 20
"""Steps in which a run may still show what it has: a scaler, batches, updates that are decided upon."""
LOOK_EVERY = 10
"""Steps between two looks afterwards."""


def ask_again(step: int) -> int:
    """``rests_until`` of a probe that found nothing at ``step``: no rest while the run is young."""
    return step + LOOK_EVERY if step > SETTLED else step
