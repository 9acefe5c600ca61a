"""The built-in conditions, registered through the same hook that plugins use.

One file per idea; each holds the scorers, the compilers and the schemas of its conditions, and what they share stands
in ``base.py`` and ``baselines.py``. To write your own, see docs/plugins/writing-a-condition.md.
"""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.core.protocols import ConditionType
from healthcheck.extend.hookspecs import hookimpl
from healthcheck.rulelang.conditions.absence import MISSING, STALE
from healthcheck.rulelang.conditions.baselines import RATIO
from healthcheck.rulelang.conditions.changes import DELTA, INCREASE, NO_IMPROVEMENT, UNCHANGED
from healthcheck.rulelang.conditions.combined import ALL, ANY
from healthcheck.rulelang.conditions.drawdown import DRAWDOWN
from healthcheck.rulelang.conditions.gain import GAIN
from healthcheck.rulelang.conditions.levels import AGGREGATES, NONFINITE, OUTLIER, THRESHOLDS
from healthcheck.rulelang.conditions.rebound import REBOUND
from healthcheck.rulelang.conditions.spikes import ROBUST_Z, ZSCORE
from healthcheck.rulelang.conditions.superiority import SUPERIORITY
from healthcheck.rulelang.conditions.trends import DRIFT, SLOPE

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
    DRAWDOWN,
    GAIN,
    SUPERIORITY,
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
