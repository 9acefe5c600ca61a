"""Every condition against its definition, written out slowly: all values again for each score.

The conditions keep sorted windows, running sums and bounds so that a sample costs microseconds. None
of that may change a score.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from statistics import NormalDist, mean, median, stdev
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from language import condition, update

from healthcheck.rulelang.conditions.baselines import TAIL_T, TAIL_Z, widening, widening_mad
from healthcheck.rulelang.conditions.combined import CombinedScorer

Values = Sequence[float]
Score = float | None
Definition = Callable[[Values, Any], Score]
"""Score of the last of some values."""


def mad(values: Values) -> float:
    center = median(values)
    return median([abs(v - center) for v in values])


def robust(past: Values, x: float, floor: float) -> float:
    center, n = median(past), len(past)
    scale = max(1.4826 * mad(past), floor)
    if scale == 0.0:
        scale = 1.2533 * mean([abs(v - center) for v in past])
    away = x - center
    if scale == 0.0:
        return math.copysign(math.inf, away) if away else 0.0
    return away / (scale * widening_mad(n))


def robust_z(values: Values, o: Any) -> Score:
    *before, x = values
    past = before[-o["window"] :]
    if len(past) < o["min_samples"]:
        return None
    if o.get("log") and min([*past, x]) > 0:
        score, normal = robust([math.log(v) for v in past], math.log(x), 0.001), math.exp(median(map(math.log, past)))
    else:
        score, normal = robust(past, x, 0.001 * abs(median(past))), median(past)
    least, limit = o.get("min_ratio", 1.0), o["above"]
    if least > 1.0 and score > limit and normal > 0 and x > 0:
        share = abs(math.log(x / normal)) / math.log(least)
        newest = values[-o["window"] :]
        older = newest[: len(newest) // 2]
        beyond = [v for v in older if v > math.sqrt(x * normal)]
        usual = len(beyond) >= max(3, 0.1 * len(older))
        return (0.0 if usual else score) if share >= 1.0 else share * limit
    return score


def zscore(values: Values, o: Any) -> Score:
    """Where nothing breaches nothing is clipped: the limit of the test is out of reach."""
    *before, x = values
    past = before[-o["window"] :]
    if len(past) < o["min_samples"]:
        return None
    scale = max(stdev(past), 0.001 * abs(mean(past))) * widening(len(past))
    return (x - mean(past)) / scale if scale else None


def ratio(values: Values, o: Any) -> Score:
    *before, x = values
    past = before[-o["window"] :]
    if len(past if o["to"] != "first" else before) < o["min_samples"]:
        return None
    if o["to"] == "ewma":
        level = 0.0
        for count, v in enumerate(before, 1):
            level += max(2.0 / (o["window"] + 1), 1.0 / count) * (v - level)
    else:
        level = {
            "median": lambda: median(past),
            "mean": lambda: mean(past),
            "best": lambda: min(past),
            "first": lambda: median(before[: o["min_samples"]]),
        }[o["to"]]()
    return x / level if level > 0 else None


def aggregate(values: Values, o: Any) -> Score:
    window = sorted(values[-o["window"] :])
    if len(window) < min(8, o["window"]):
        return None
    if o["what"] == "mean":
        return mean(window)
    place = {"min": 0.0, "max": 1.0}.get(o["what"], o.get("p", 0) / 100) * (len(window) - 1)
    low, high = window[math.floor(place)], window[math.ceil(place)]
    return low + (place - math.floor(place)) * (high - low)


def slope(values: Values, o: Any) -> Score:
    n = min(len(values), o["over"])
    if n < min(8, o["over"]):
        return None
    ys = values[-n:]
    at, level = mean(range(n)), mean(ys)
    found = sum((x - at) * (y - level) for x, y in enumerate(ys)) / sum((x - at) ** 2 for x in range(n))
    return found if not o.get("relative") else (found / abs(level) if level else None)


def sure_slope(values: Values, o: Any) -> Score:
    """Sen's interval over the medians of whole blocks."""
    block = max(1, o["over"] // 32)
    blocks = [median(values[i : i + block]) for i in range(0, len(values) - block + 1, block)]
    if len(blocks) < max(4, math.ceil(min(8, o["over"]) / block)):
        return None
    ys = blocks[-(o["over"] // block) :]
    n = len(ys)
    slopes = sorted((ys[j] - ys[i]) / ((j - i) * block) for i, j in itertools.combinations(range(n), 2))
    ties = [len(list(group)) for _, group in itertools.groupby(sorted(ys))]
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    half = NormalDist().inv_cdf(o["confidence"]) * math.sqrt(variance)
    below, above = int((len(slopes) - half) / 2), int((len(slopes) + half) / 2 + 1)
    low = slopes[below - 1] if below > 0 else -math.inf
    high = slopes[above - 1] if above <= len(slopes) else math.inf
    if "above" in o:
        bound = low
    elif "below" in o:
        bound = high
    else:
        bound = low if low > 0 else high if high < 0 else 0.0
    return bound if math.isfinite(bound) else None


def rebound(values: Values, o: Any) -> Score:
    if values[-1] == 0 or min(values) < 0:
        return None
    values = [v for v in values if v > 0]
    levels = [median(values[max(0, i - max(1, min(o["smooth"], i // 8))) : i]) for i in range(1, len(values) + 1)]
    if len(values) < 2:
        return None
    best, level, count = min(levels), levels[-1], len(values)
    best_at = levels.index(best) + 1
    turned = best <= levels[0] * (1 - o["fell"]) and count - best_at >= o["behind"] * count
    if turned and o["sigmas"]:
        differences = [abs(math.log(b / a)) for a, b in itertools.pairwise(values)][:-2][-64:]
        if not differences:
            return 1.0
        many = len(differences) >= 32
        noise = 1.4826 / math.sqrt(2) * median(differences) if many else math.sqrt(math.pi) / 2 * mean(differences)
        width = len(values[max(0, count - max(1, min(o["smooth"], count // 8))) :])
        turned = math.log(level / best) > o["sigmas"] * (1 + 1 / math.sqrt(width)) * max(0.002, noise)
    return level / best if turned else 1.0


def drift(values: Values, o: Any) -> Score:
    total, score = 0.0, None
    lag = max(1, o["window"] // 4)
    for i, x in enumerate(values):
        past = values[: max(0, i - lag)][-o["window"] :]
        if len(past) < max(4, min(8, o["window"])):
            score = None
            continue
        center = median(past)
        scale = max(1.4826 * mad(past), 0.001 * abs(center)) * widening_mad(len(past))
        z = max(-4.0, min(4.0, (x - center) / scale)) if scale else math.copysign(4.0, x - center) * (x != center)
        score = total = min(max(0.0, total + z - 1.0), 2 * o["above"])
    return score


def no_improvement(values: Values, o: Any) -> Score:
    best, since = values[0], 0
    for x in values[1:]:
        if best - x > 0 and best - x > o["min_rel"] * abs(best):
            best, since = x, 0
        else:
            since += 1
    return float(since) if len(values) > 1 else None


def unchanged(values: Values, o: Any) -> Score:
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], itertools.pairwise(reversed(values))))
    return float(same) if len(values) > 1 else None


def increase(values: Values, o: Any) -> Score:
    grown = [b - a if b >= a else max(b, 0.0) for a, b in itertools.pairwise(values)][-o["window"] :]
    return sum(grown) if grown else None


def delta(values: Values, o: Any) -> Score:
    return values[-1] - values[-1 - o["over"]] if len(values) > o["over"] else None


def inside(t: float, freedom: int) -> float:
    """Probability that Student's t lies within -t and t: Abramowitz and Stegun 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    c2 = math.cos(angle) ** 2
    if freedom % 2:
        term = total = math.cos(angle) if freedom > 1 else 0.0
        for k in range(3, freedom - 1, 2):
            term *= c2 * (k - 1) / k
            total += term
        return 2.0 / math.pi * (angle + math.sin(angle) * total)
    term = total = 1.0
    for k in range(2, freedom - 1, 2):
        term *= c2 * (k - 1) / k
        total += term
    return math.sin(angle) * total


def test_the_table_of_t_quantiles_holds_the_tail_of_a_thousandth() -> None:
    for freedom, quantile in enumerate(TAIL_T, 1):
        assert 1.0 - inside(quantile, freedom) == pytest.approx(0.002, rel=1e-9), freedom
    assert 1.0 - NormalDist().cdf(TAIL_Z) == pytest.approx(0.001, rel=1e-9)


CASES: list[tuple[str, Definition, dict[str, Any]]] = [
    *(
        ("robust_z", robust_z, {"above": 3, "window": w, "log": log, "min_ratio": r, "min_samples": min(8, w)})
        for w, log, r in itertools.product((7, 20), (False, True), (1.0, 1.5))
    ),
    ("zscore", zscore, {"above": 1e9, "window": 12, "min_samples": 8}),
    *(
        ("ratio", ratio, {"above": 1e9, "to": to, "window": 9, "min_samples": n})
        for to, n in itertools.product(("median", "mean", "ewma", "best", "first"), (1, 4))
    ),
    ("mean", aggregate, {"above": 1, "window": 10, "what": "mean"}),
    ("min", aggregate, {"above": 1, "window": 3, "what": "min"}),
    ("max", aggregate, {"above": 1, "window": 9, "what": "max"}),
    ("percentile", aggregate, {"above": 1, "window": 15, "p": 30, "what": "percentile"}),
    ("slope", slope, {"above": 1, "over": 15}),
    ("slope", slope, {"above": 1, "over": 15, "relative": True}),
    *(
        ("slope", sure_slope, {**test, "over": over, "confidence": 0.9})
        for test, over in itertools.product(({"above": 0}, {"below": 0}, {"equals": 0}), (12, 64, 100))
    ),
    *(
        ("rebound", rebound, {"above": 1.1, "sigmas": s, "fell": f, "behind": b, "smooth": m})
        for s, f, b, m in ((0, 0.0, 0.0, 32), (2, 0.05, 0.0, 4), (5, 0.05, 0.1, 8), (1, 0.0, 0.0, 1))
    ),
    ("drift", drift, {"above": 20, "window": 16}),
    ("no_improvement", no_improvement, {"over": 10, "min_rel": 0.01}),
    ("unchanged", unchanged, {"over": 3}),
    ("increase", increase, {"above": 1, "window": 6}),
    ("delta", delta, {"above": 1, "over": 4}),
]


def series(seed: int, length: int) -> list[float]:
    """What logs hold: noise, falls, jumps, ties, plateaus; some with zeros and negative values."""
    draw = random.Random(seed)
    level, fall, sign = draw.choice([0.5, 1.0, 40.0]), draw.choice([1.0, 0.97, 1.03]), draw.random() < 0.2
    made: list[float] = []
    for _ in range(length):
        level *= fall if draw.random() < 0.9 else draw.choice([1.0, 0.5, 3.0])
        value = level * (1 + draw.choice([0.0, 0.01, 0.1]) * draw.gauss(0, 1))
        if draw.random() < 0.15 and made:
            value = made[-1]
        if draw.random() < 0.1:
            value = round(value, 1)
        made.append(value if not sign or draw.random() < 0.8 else draw.choice([0.0, -value]))
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{'-'.join(map(str, c[2].values()))}")
@settings(
    max_examples=3, deadline=None, derandomize=True, phases=(Phase.generate,), suppress_health_check=list(HealthCheck)
)
@given(seed=st.integers(0, 10**9), length=st.integers(40, 150))
def test_a_condition_scores_as_its_definition_says(
    case: tuple[str, Definition, dict[str, Any]], seed: int, length: int
) -> None:
    name, definition, options = case
    rule = {"min_samples": options["min_samples"]} if "min_samples" in options else {}
    written = {k: v for k, v in options.items() if k not in ("min_samples", "what")}
    scorer = condition(name, written, **rule).start()
    values = series(seed, length)
    # Logged far apart a jump is a rise that was not seen; what `rebound` makes of a new level is tested by itself.
    apart = 10 if name == "rebound" else 1

    found = [update(scorer, value, apart * step) for step, value in enumerate(values, 1)]

    for i, score in enumerate(found, 1):
        wanted = definition(values[:i], options)
        assert (score is None) == (wanted is None), f"sample {i}: {score}, not {wanted}"
        if wanted is not None:
            assert score == pytest.approx(wanted, rel=1e-9, abs=1e-9), f"sample {i}"


PARTS: list[list[tuple[str, dict[str, Any]]]] = [
    [("ratio", {"above": 0.9, "window": 8}), ("ratio", {"below": 1.1, "window": 8}), ("mean", {"above": 1})],
    [("ratio", {"above": 0.9, "to": "first"}), ("ratio", {"below": 2, "to": "first"}), ("ratio", {"above": 1})],
    [("ratio", {"above": 1, "to": "best", "window": 6}), ("ratio", {"below": 2, "to": "best", "window": 6})],
    [("slope", {**test, "over": 12, "confidence": 0.9}) for test in ({"above": -0.5}, {"below": 0.5}, {"equals": 0})],
]


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(name for name, _ in parts))
@pytest.mark.parametrize("seed", range(5))
def test_parts_that_share_what_they_remember_count_like_parts_alone(
    parts: list[tuple[str, dict[str, Any]]], seed: int
) -> None:
    conditions = [condition(name, options) for name, options in parts]
    alone = [one.start() for one in conditions]
    together = CombinedScorer(conditions, (), need_all=False)

    for step, value in enumerate(series(seed, 150), 1):
        scores = [update(scorer, value, step) for scorer in alone]
        known = [one.breaches(score) for one, score in zip(conditions, scores, strict=True) if score is not None]
        assert update(together, value, step) == (float(sum(known)) if known else None)
