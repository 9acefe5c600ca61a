"""The built-in conditions, registered through the same hook that plugins use.

One file per idea; each holds the scorers, the compiler and the schema of its conditions. To write
your own, copy ``outlier.py`` (no memory) or ``zscore.py`` (a baseline) and register it with
``healthcheck_register_conditions``.
"""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.hookspecs import hookimpl
from healthcheck.protocols import ConditionType
from healthcheck.rulelang.conditions.absence import MISSING, STALE
from healthcheck.rulelang.conditions.aggregates import AGGREGATES
from healthcheck.rulelang.conditions.change import DELTA, INCREASE
from healthcheck.rulelang.conditions.combined import ALL, ANY
from healthcheck.rulelang.conditions.drift import DRIFT
from healthcheck.rulelang.conditions.nonfinite import NONFINITE
from healthcheck.rulelang.conditions.outlier import OUTLIER
from healthcheck.rulelang.conditions.progress import NO_IMPROVEMENT, UNCHANGED
from healthcheck.rulelang.conditions.ratio import RATIO
from healthcheck.rulelang.conditions.rebound import REBOUND
from healthcheck.rulelang.conditions.robust_z import ROBUST_Z
from healthcheck.rulelang.conditions.slope import SLOPE
from healthcheck.rulelang.conditions.threshold import THRESHOLDS
from healthcheck.rulelang.conditions.zscore import ZSCORE

CONDITIONS: tuple[ConditionType, ...] = (
    *THRESHOLDS,
    NONFINITE,
    ZSCORE,
    ROBUST_Z,
    RATIO,
    *AGGREGATES,
    DELTA,
    INCREASE,
    SLOPE,
    DRIFT,
    REBOUND,
    NO_IMPROVEMENT,
    UNCHANGED,
    STALE,
    MISSING,
    OUTLIER,
    ALL,
    ANY,
)


@hookimpl
def healthcheck_register_conditions(register: Callable[[ConditionType], None]) -> None:
    """Register the built-in conditions."""
    for condition in CONDITIONS:
        register(condition)
