"""How much wider a threshold must be when the baseline has few samples.

A z-score over n values follows Student's t, not a normal distribution, and a scale that comes
from n values may be too small by chance. A rule that is written for a full window must not cry
wolf at the eighth sample, so its score is divided by

    widening(n) = t(n - 1) / z * sqrt(1 + 1/n)          at the one-sided tail of 0.1 %

(z = 3.09; the root counts the error of the mean itself). The factor is 1.64 at 8 samples, 1.19 at
20, 1.02 at 200. A fixed tail is used because the quantile for the tail that "8 sigmas" stands for
would be astronomically large at few samples and hide real spikes.

The MAD is 37 % efficient: n values tell as much about the scale as 0.37 n would with the standard
deviation. ``widening_mad`` therefore uses t with 0.37 (n - 1) degrees of freedom (at least 2), and
multiplies by the factor that removes the small-sample bias of the MAD.

Sources: Abramowitz and Stegun 26.7.3-4 (t distribution); 26.7.5 (expansion for many degrees of
freedom); Croux and Rousseeuw, "Time-efficient algorithms for two highly robust estimators of
scale", 1992 (bias factors of the MAD).
"""

from __future__ import annotations

from functools import lru_cache
from math import atan, cos, pi, sin, sqrt

TAIL = 0.001
Z = 3.090232306167813
"""The standard normal quantile of ``TAIL``, one-sided."""
MAD_EFFICIENCY = 0.37
_MAD_BIAS = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}


@lru_cache(maxsize=65536)
def widening(n: int) -> float:
    """Divide a z-score over ``n`` values by this. At least 1, and 1 in the limit."""
    if n < 2:
        return float("inf")
    return _t_quantile(float(n - 1)) / Z * sqrt(1.0 + 1.0 / n)


@lru_cache(maxsize=65536)
def widening_mad(n: int) -> float:
    """Divide a robust z-score (median and MAD of ``n`` values) by this."""
    if n < 2:
        return float("inf")
    bias = _MAD_BIAS.get(n) or n / (n - 0.8)
    freedom = max(2.0, MAD_EFFICIENCY * (n - 1))
    return bias * _t_quantile(freedom) / Z * sqrt(1.0 + 1.57 / n)  # 1.57: variance of a median against a mean


def _t_quantile(freedom: float) -> float:
    """The one-sided ``TAIL`` quantile of Student's t, for any degrees of freedom from 1 on."""
    if freedom > 60:
        z, v = Z, freedom
        return (
            z
            + (z**3 + z) / (4 * v)
            + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
        )
    low = int(freedom)
    if low == freedom:
        return _t_quantile_whole(low)
    # Quantiles are close to linear in 1 / freedom between whole numbers.
    share = (1 / low - 1 / freedom) / (1 / low - 1 / (low + 1))
    return (1 - share) * _t_quantile_whole(low) + share * _t_quantile_whole(low + 1)


@lru_cache(maxsize=128)
def _t_quantile_whole(freedom: int) -> float:
    low, high = 0.0, 400.0
    for _ in range(60):
        mid = 0.5 * (low + high)
        if _inside(mid, freedom) < 1.0 - 2.0 * TAIL:
            low = mid
        else:
            high = mid
    return 0.5 * (low + high)


def _inside(t: float, freedom: int) -> float:
    """Probability that Student's t lies within -t and t."""
    angle = atan(t / sqrt(freedom))
    c2 = cos(angle) ** 2
    if freedom % 2:
        term = total = cos(angle) if freedom > 1 else 0.0
        for k in range(3, freedom - 1, 2):
            term *= c2 * (k - 1) / k
            total += term
        return 2.0 / pi * (angle + sin(angle) * total)
    term = total = 1.0
    for k in range(2, freedom - 1, 2):
        term *= c2 * (k - 1) / k
        total += term
    return sin(angle) * total
