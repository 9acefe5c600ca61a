"""A value that is not finite because it grew without bound before: then the growth is the story, not the batch of that step."""

from __future__ import annotations

import math
from collections.abc import Callable

from healthcheck.core.alerts import Finding
from healthcheck.core.text import number, plural

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
