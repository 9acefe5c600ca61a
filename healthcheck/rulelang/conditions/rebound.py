"""``rebound``: a value that had come down and goes up again, however densely it is logged.

The *level* is the median of the newest samples, an eighth of all so far and at most ``smooth`` of
them: one sample where a run has ten, 32 where it has thousands. The score is the level divided by
the lowest level so far: the generalisation loss of early stopping (Prechelt, "Early stopping - but
when?", 1998), and with ``sigmas`` the alarm of Page's test (Page, "Continuous inspection schemes",
1954), which also watches the distance from the lowest point so far.

Three demands keep apart what looks alike; while one is not met the score is 1:

``fell``    the lowest level lies this far below the first one. A loss that has only ever risen
            (a penalty that is annealed, targets that grow) has not turned round.
``behind``  the lowest level is this share of all samples back: a dip is not a trend.
``sigmas``  the rise, in logarithms, is this many times the noise, see ``noise.py``. While the level
            is a single sample, twice as much is asked for, because both it and the lowest so far are
            extremes: 1 + 1/sqrt(m) times, where the level is the median of m.

With ``sigmas`` a new level is told from a rise, see ``newlevel.py``: harder data, longer sequences or
another weight in the loss lift it from one sample to the next and let it stay or fall, and the lowest
level is then sought anew. And while the level is a single sample, the lowest is the higher of two
neighbours, where every step is seen: one window of accumulation that is shorter than the others makes one small loss.

Ratios of values around zero mean nothing: a series that has been negative is not judged again, and
zeros are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthcheck.protocols import Condition, ConditionType
from healthcheck.rulelang.conditions.base import (
    QUANTITY,
    Compiled,
    OptionError,
    min_samples_of,
    number_schema,
    options_schema,
    sample_count,
    the_comparator,
    window_schema,
)
from healthcheck.rulelang.conditions.turning import Rebound
from healthcheck.rulelang.quantities import QuantityError, parse_quantity


def compile_rebound(options: Any, rule: Mapping[str, Any]) -> Condition:
    breaches = the_comparator(options, "rebound")
    if breaches.high is None or breaches.low is not None or breaches.high < 1.0:
        raise OptionError("the rebound score is a factor that starts at 1; compare it with `above: ...`, such as 1.05")
    smooth = sample_count(options, "smooth", 32)
    sigmas = float(options.get("sigmas", 0.0))
    fell, behind = _share(options, "fell"), _share(options, "behind")
    min_samples = max(2, min_samples_of(rule, 1_000_000, default=2))
    return Compiled(
        "rebound",
        breaches,
        lambda: Rebound(min_samples, smooth=smooth, sigmas=sigmas, fell=fell, behind=behind),
        "{series} {value} is back at {score:.2f} times its lowest level {normal}",
        baseline=True,
        min_samples=min_samples,
        window=smooth,
    )


def _share(options: Mapping[str, Any], key: str) -> float:
    try:
        share = parse_quantity(options.get(key, 0.0))
    except QuantityError as error:
        raise OptionError(str(error), key) from None
    if not 0.0 <= share < 1.0:
        raise OptionError(f"`{key}` is a share from 0 to below 1, such as 5%", key)
    return share


REBOUND = ConditionType(
    "rebound",
    options_schema(
        "The level (median of an eighth of the samples so far) divided by the lowest level so far.",
        smooth=window_schema("Samples in the median, at most (32).", least=1),
        sigmas=number_schema("The rise must exceed so many times the noise between neighbours (0).", minimum=0),
        fell={
            "description": "How far the lowest level must lie below the first one: 5% (0).",
            "allOf": [QUANTITY],
        },
        behind={
            "description": "How far back the lowest level must lie, as a share of all samples so far: 25% (0).",
            "allOf": [QUANTITY],
        },
    ),
    compile_rebound,
    help="A value that had come down and goes up again, however densely it is logged.",
)
