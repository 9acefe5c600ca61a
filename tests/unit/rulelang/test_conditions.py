"""What each condition finds, and what it must not be fooled by."""

from __future__ import annotations

import json
import math
import random
from math import exp, pi, sin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from language import EXAMPLES, VARIANTS, condition, noisy, registry, scores, update

from healthcheck.core.protocols import Bound
from healthcheck.rulelang.conditions import CONDITIONS
from healthcheck.rulelang.conditions.base import OptionError


def test_every_built_in_condition_has_an_example_here() -> None:
    """`all` and `any` have no memory of their own: the engine keeps their parts'."""
    assert {kind.name for kind in CONDITIONS} == {*EXAMPLES, "all", "any"}


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize("policy", [{}, {"outliers": "exclude"}, {"outliers": "clip", "reseed": 4}], ids=str)
def test_saved_state_goes_on_as_if_nothing_had_happened(name, options, policy) -> None:
    """Resume at any step must give the scores of an unbroken run, through JSON and bit for bit."""
    draw = random.Random(3)
    values = [2 + draw.gauss(0, 0.1) + (5 if i % 37 == 36 else 0) + (3 if i > 90 else 0) for i in range(150)]
    values[40:44] = [2.0] * 4
    compiled = condition(name, options, **policy)
    unbroken = compiled.start()
    expected = [update(unbroken, v, i + 1) for i, v in enumerate(values)]

    for cut in (0, 1, 5, 21, 40, 97):
        first = compiled.start()
        for i, v in enumerate(values[:cut]):
            update(first, v, i + 1)
        second = compiled.start()
        second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
        resumed = [update(second, v, cut + i + 1) for i, v in enumerate(values[cut:])]
        assert resumed == expected[cut:], f"differs when cut at {cut}"


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "")
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), max_size=60))
@settings(max_examples=settings.default.max_examples // 5, deadline=None)
def test_no_finite_series_makes_a_condition_raise(name, options, values) -> None:
    scorer = condition(name, options).start()
    for i, value in enumerate(values):
        score = update(scorer, value, i + 1)
        assert score is None or isinstance(score, float)
    json.dumps(scorer.state(), allow_nan=False)


# --------------------------------------------------------------------------- spikes


@pytest.mark.parametrize("name", ["robust_z", "zscore"])
def test_a_sample_is_scored_against_the_window_before_it(name) -> None:
    values = [*noisy(300), 20.0]
    compiled = condition(name, {"above": 8, "window": 200})
    found = scores(compiled, values)
    assert compiled.breaches(found[-1])
    assert not any(s is not None and compiled.breaches(s) for s in found[:-1])


@pytest.mark.parametrize("policy", [{}, {"outliers": "clip"}], ids=str)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_slow_change_between_samples_that_are_far_apart_is_no_spike(policy: dict[str, str], at_once: bool) -> None:
    values = [*noisy(150), *(2.0 + 0.4 * i for i in range(1, 11))]
    sparse = [*range(1, 151), *range(400, 400 + 250 * 10, 250)]
    options = {"above": 8, "window": 128, "log": True, "min_ratio": 1.2}
    quiet = Bound(-math.inf, 8.0)

    def highest(steps: list[int]) -> float:
        scorer = condition("robust_z", options, **policy).start()
        if at_once:
            return max((score for score, _ in scorer.update(values, steps, quiet) if score is not None), default=0.0)
        return max(score or 0.0 for score in (update(scorer, v, s) for v, s in zip(values, steps, strict=True)))

    assert highest([*range(1, 161)]) > 8
    assert highest(sparse) <= 8


def test_a_nan_does_not_blind_the_spike_rule() -> None:
    """One NaN at step 150 must not hide a 10x spike at step 200 (the usual code misses it)."""
    values = noisy(200)
    values[149] = math.nan
    values[199] = 20.0
    for name in ("robust_z", "zscore", "ratio"):
        compiled = condition(name, {"above": 3 if name == "ratio" else 8, "window": 100})
        assert compiled.breaches(scores(compiled, values)[199]), name


def test_a_smaller_spike_after_a_larger_one_is_found() -> None:
    values = noisy(400)
    values[300], values[320] = 20.0, 6.0
    for name in ("robust_z", "zscore"):
        compiled = condition(name, {"above": 8, "window": 200})
        assert compiled.breaches(scores(compiled, values)[320]), name


def test_a_burst_does_not_mask_itself() -> None:
    values = [*noisy(300), *[9.0] * 5]
    for name in ("robust_z", "zscore"):
        compiled = condition(name, {"above": 6, "window": 200})
        assert all(compiled.breaches(s) for s in scores(compiled, values)[-5:]), name


def test_a_new_level_is_accepted_in_time_by_clip_but_not_by_exclude() -> None:
    values = [*noisy(300), *noisy(400, seed=1, level=3.0)]
    alarms = {}
    for policy in ("clip", "exclude"):
        compiled = condition("zscore", {"above": 6, "window": 200}, outliers=policy)
        alarms[policy] = sum(s is not None and compiled.breaches(s) for s in scores(compiled, values))
    assert alarms["exclude"] == 400
    assert 0 < alarms["clip"] < 100


def test_reseed_accepts_the_new_level_after_n_breaches_in_a_row() -> None:
    values = [*noisy(300), *noisy(200, seed=1, level=3.0)]
    compiled = condition("zscore", {"above": 6, "window": 200}, outliers="exclude", reseed=30)
    breached = [s is not None and compiled.breaches(s) for s in scores(compiled, values)]
    assert sum(breached) == 30
    assert not any(breached[335:])


def test_a_constant_series_divides_by_a_tenth_of_a_percent() -> None:
    compiled = condition("robust_z", {"above": 8, "window": 200})
    found = scores(compiled, [2.0] * 100 + [2.001, 2.1])
    assert found[-2] == pytest.approx(0.5, rel=0.1)
    assert compiled.breaches(found[-1])


def test_a_window_of_zeros_knows_no_scale_and_anything_else_is_infinitely_far() -> None:
    for name in ("robust_z", "zscore"):
        found = scores(condition(name, {"above": 8, "window": 50}), [0.0] * 30 + [1.0])
        assert found[-2] == 0.0
        assert found[-1] == math.inf


def test_mostly_equal_values_fall_back_to_the_mean_deviation() -> None:
    """More than half zeros make the MAD zero; a value seen before is then no spike."""
    values = ([0.0, 0.0, 1.0] * 40)[:100]
    compiled = condition("robust_z", {"above": 8, "window": 100})
    assert not any(s is not None and compiled.breaches(s) for s in scores(compiled, values)[20:])


def test_on_logarithms_factors_count_and_not_distances() -> None:
    """Noise that multiplies (a loss of small batches) is skewed: plain z-scores alarm on its tail."""
    draw = random.Random(1)
    values = [math.exp(draw.gauss(0, 0.5)) for _ in range(2000)]
    log = condition("robust_z", {"above": 5, "window": 128, "log": True})
    plain = condition("robust_z", {"above": 5, "window": 128})
    false = {c: sum(s is not None and c.breaches(s) for s in scores(c, values)) for c in (log, plain)}
    assert false[plain] >= 5
    assert false[log] == 0
    assert log.breaches(scores(log, [*values, 40.0])[-1])


def test_the_ratio_floor_keeps_a_quiet_window_from_crying_wolf() -> None:
    values = [*noisy(200, noise=0.0005), 2.2, 3.0]
    without = condition("robust_z", {"above": 8, "window": 200})
    with_floor = condition("robust_z", {"above": 8, "window": 200, "min_ratio": 1.25})
    assert without.breaches(scores(without, values)[-2])
    found = scores(with_floor, values)
    assert not with_floor.breaches(found[-2])
    assert 0 < found[-2] < 8, "the closest approach says how near it came"
    assert with_floor.breaches(found[-1])


def test_the_logarithm_and_the_ratio_floor_stand_aside_when_something_is_not_positive() -> None:
    values = [*noisy(100, level=0.0, noise=0.5), 30.0]
    compiled = condition("robust_z", {"above": 8, "window": 64, "log": True, "min_ratio": 1.25})
    assert compiled.breaches(scores(compiled, values)[-1])


@pytest.mark.parametrize("name", ["robust_z", "zscore"])
def test_few_samples_do_not_make_a_rule_cry_wolf(name) -> None:
    """Thresholds are wider while the window is short: pure noise, judged from the 8th sample on."""
    alarms = 0
    for seed in range(400):
        compiled = condition(name, {"outside": [-8, 8], "window": 200})
        found = scores(compiled, noisy(32, seed=seed))
        assert found[7] is None
        assert found[8] is not None
        alarms += any(s is not None and compiled.breaches(s) for s in found)
    assert alarms <= 4


def test_a_clear_spike_is_still_found_with_few_samples() -> None:
    compiled = condition("robust_z", {"above": 8, "window": 200})
    hits = sum(compiled.breaches(scores(compiled, [*noisy(12, seed=s), 10.0])[-1]) for s in range(50))
    assert hits >= 45


# --------------------------------------------------------------------------- the others


def test_ratio_is_not_judged_while_the_baseline_is_not_positive() -> None:
    assert scores(condition("ratio", {"above": 2, "window": 20}), [-1.0] * 30 + [5.0])[-1] is None


def test_ratio_to_best_takes_the_largest_for_below_and_the_smallest_for_above() -> None:
    assert scores(condition("ratio", {"below": 0.75, "to": "best"}), [1, 4, 2])[-1] == 0.5
    assert scores(condition("ratio", {"above": 1.5, "to": "best"}), [4, 1, 2])[-1] == 2.0


def test_increase_tolerates_a_reset() -> None:
    values = [0, 1, 2, 3, 0, 1]
    assert scores(condition("increase", {"above": 0, "window": 10}), [float(v) for v in values])[-1] == 4.0


def test_increase_of_a_counter_leaves_the_window() -> None:
    values = [0.0, 1.0] + [1.0] * 10
    found = scores(condition("increase", {"above": 0, "window": 5}), values)
    assert found[1] == 1.0
    assert found[-1] == 0.0


def test_slope_of_a_line_is_exact_over_samples_and_over_steps() -> None:
    line = [3.0 + 0.5 * i for i in range(50)]
    assert scores(condition("slope", {"above": 0, "over": 20}), line)[-1] == pytest.approx(0.5)
    scorer = condition("slope", {"above": 0, "over": 20, "per": "step"}).start()
    found = [update(scorer, v, 50 * (i + 1)) for i, v in enumerate(line)]
    assert found[-1] == pytest.approx(0.01)


def test_slope_stays_exact_far_from_zero() -> None:
    """Running sums must not cancel: steps of a million, a level of a billion."""
    scorer = condition("slope", {"above": 0, "over": 50, "per": "step"}).start()
    found = [update(scorer, 1e9 + 0.25 * i, 1_000_000 + i) for i in range(5000)]
    assert found[-1] == pytest.approx(0.25, rel=1e-6)


def test_a_sure_slope_does_not_call_noise_a_trend() -> None:
    false = 0
    for seed in range(60):
        compiled = condition("slope", {"above": 0, "over": 200, "confidence": 0.99})
        false += compiled.breaches(scores(compiled, noisy(200, seed=seed))[-1])
    assert false <= 3


def test_a_sure_slope_finds_a_rise_that_is_hidden_in_noise() -> None:
    draw = random.Random(5)
    compiled = condition("slope", {"above": 0, "over": 200, "confidence": 0.95})
    rise = [2 + 0.002 * i + draw.gauss(0, 0.1) for i in range(200)]
    assert compiled.breaches(scores(compiled, rise)[-1])


def test_drift_finds_a_slow_divergence_within_its_bound_and_not_a_single_spike() -> None:
    """O2: a 200-step ramp to three times the level is found in at most 25 steps."""
    compiled = condition("drift", {"above": 25, "window": 100})
    calm = noisy(400)
    spiked = [*calm[:300], 50.0, *calm[301:]]
    assert not any(s is not None and compiled.breaches(s) for s in scores(compiled, spiked))
    ramp = [*noisy(300), *(2 + 4 * i / 200 + random.Random(i).gauss(0, 0.05) for i in range(200))]
    first = next(i for i, s in enumerate(scores(compiled, ramp)) if s is not None and compiled.breaches(s))
    assert 300 < first <= 325


def test_drift_clears_after_the_level_is_normal_again() -> None:
    compiled = condition("drift", {"above": 25, "window": 50})
    found = scores(compiled, [*noisy(200), *[3.0] * 30, *noisy(300, seed=2)])
    assert compiled.breaches(found[225])
    assert not compiled.breaches(found[-1])


def test_no_improvement_counts_samples_since_the_best() -> None:
    found = scores(condition("no_improvement", {"over": 3, "min_rel": 0.1}), [10, 9.5, 8, 8, 8, 7.9])
    assert found == [None, 1.0, 0.0, 1.0, 2.0, 3.0]


def test_unchanged_means_bit_equal() -> None:
    assert scores(condition("unchanged", {"over": 2}), [1.0, 1.0, 1.0 + 1e-15, 1.0]) == [None, 1.0, 0.0, 0.0]


def test_nonfinite_counts_in_a_window() -> None:
    compiled = condition("nonfinite", {"count": 2, "window": 3})
    found = scores(compiled, [math.nan, 1.0, math.inf, 1.0, 1.0, 1.0])
    assert [compiled.breaches(s) for s in found] == [False, False, True, False, False, False]


def test_stale_has_its_own_budget_for_the_start() -> None:
    short, long = condition("stale", "300s"), condition("stale", {"after": "300s", "first": "2h"})
    assert (short.absence, short.breaches.text, short.first) == ("seconds", "at least 300s", 1200.0)
    assert long.first == 7200.0
    assert condition("stale", "2h").first == 7200.0, "never less than the budget itself"


def test_stale_learns_what_is_usual_where_it_may() -> None:
    compiled = condition("stale", {"after": "60s", "times": 5})
    scorer = compiled.start()
    assert compiled.breaches(update(scorer, 61.0, 0))
    scorer.arrived(100.0)
    assert not compiled.breaches(update(scorer, 499.0, 0))
    assert compiled.breaches(update(scorer, 501.0, 0))


def test_parts_may_watch_other_metrics_and_bring_their_own_conditions() -> None:
    from healthcheck.rulelang.compile import load_rules

    rule = load_rules(
        ["version: 1\nrules:\n  a: {metric: loss, when: {all: [{above: 5}, {metric: 'lr[group=*]', equals: 0}]}}"],
        registry=registry(),
    ).cause("a")
    (first, one), (second, two) = rule.condition.parts
    assert first is None
    assert str(second) == "lr[group=*]"
    assert (one.name, two.name) == ("above", "equals")
    assert rule.condition.breaches(2.0)
    assert not rule.condition.breaches(1.0)


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("robust_z", {"window": 20}, {}),
        ("robust_z", {"above": 8, "window": 20}, {"min_samples": 21}),
        ("zscore", {"above": 8, "window": 20}, {"reseed": 21}),
        ("drift", {"below": 8}, {}),
        ("ratio", {"equals": 1, "to": "best"}, {}),
        ("missing", "30s", {}),
        ("stale", "soon", {}),
        ("nonfinite", {"count": 3, "window": 2}, {}),
    ],
)
def test_options_that_cannot_work_are_refused(name, options, rule) -> None:
    with pytest.raises(OptionError):
        condition(name, options, **rule)


def test_drawdown_is_the_share_of_the_gain_that_was_lost_whatever_the_sign() -> None:
    rising = [float(x) for x in range(-20, 0)]
    for offset in (0.0, 100.0, -100.0):
        back = scores(
            condition("drawdown", {"above": 0.5}), [x + offset for x in [*rising, -10.0, -10.0, -20.0, -20.0, -20.0]]
        )
        assert set(back[8:20]) == {0.0}
        assert back[-1] == pytest.approx(1.0, abs=0.1)


def test_drawdown_does_not_forget_the_peak() -> None:
    fallen = [*noisy(60, level=1.0), *noisy(400, level=0.2, seed=1)]
    found = scores(condition("drawdown", {"above": 0.5, "sigmas": 4}), fallen)
    assert max(found[8:60]) == 0.0
    assert min(found[80:]) > 0.5


def test_drawdown_leaves_single_bad_episodes_and_small_dips_alone() -> None:
    explored = [x if i % 5 else -100.0 for i, x in enumerate(noisy(300, level=100.0, noise=1.0))]
    assert max(scores(condition("drawdown", {"above": 0.5, "sigmas": 4}), explored)[8:]) == 0.0
    settled = [*noisy(100, level=200.0, noise=0.01), *noisy(100, level=199.5, noise=0.01)]
    assert max(scores(condition("drawdown", {"above": 0.5, "sigmas": 4}), settled)[8:]) == 0.0


def test_drawdown_takes_noise_for_no_fall() -> None:
    for seed in range(20):
        values = noisy(300, seed=seed, level=0.5, noise=0.3)
        assert max(scores(condition("drawdown", {"above": 0.5, "sigmas": 4}), values)[8:]) == 0.0


def test_drawdown_compares_with_a_share_that_is_lost() -> None:
    with pytest.raises(OptionError, match="above"):
        condition("drawdown", {"below": 0.5})


def test_drawdown_takes_a_few_lucky_episodes_for_no_level() -> None:
    for every in (5, 9):
        sparse = [0.0 if i % every == 3 or 120 <= i < 124 else -1.0 for i in range(400)]
        assert max(scores(condition("drawdown", {"above": 0.5, "sigmas": 4}), sparse)[8:]) == 0.0


def test_gain_is_small_for_noise_and_large_for_what_rises_whatever_its_level() -> None:
    for level in (0.0, -150.0, 20_000.0):
        flat = noisy(2000, level=level, noise=30.0)
        risen = [x + 30.0 * i / 2000 for i, x in enumerate(flat)]
        assert scores(condition("gain", {"below": 0.5}, min_samples=1000), flat)[-1] < 0.5
        assert scores(condition("gain", {"below": 0.5}, min_samples=1000), risen)[-1] > 0.7


def test_gain_counts_what_was_reached_late_or_lost_again() -> None:
    late = [*noisy(1800, level=0.0, noise=1.0), *noisy(600, level=3.0, noise=1.0)]
    lost = [*noisy(800, level=0.0, noise=1.0), *noisy(800, level=3.0, noise=1.0), *noisy(800, level=0.0, noise=1.0)]
    for values in (late, lost):
        assert scores(condition("gain", {"below": 0.5}, min_samples=1000), values)[-1] > 2.0


def test_gain_sees_a_sparse_reward_whose_usual_difference_is_none() -> None:
    sparse = [1.0 if i % 11 == 4 else 0.0 for i in range(1500)]
    assert scores(condition("gain", {"below": 0.5}, min_samples=1000), sparse)[-1] < 0.5
    oftener = [1.0 if i % (11 if i < 700 else 2) == 1 else 0.0 for i in range(1500)]
    assert scores(condition("gain", {"below": 0.5}, min_samples=1000), oftener)[-1] > 0.7


def test_gain_says_nothing_of_a_constant_and_too_few() -> None:
    assert set(scores(condition("gain", {"below": 0.5}, min_samples=8), [1.0] * 60)) == {None}
    assert set(scores(condition("gain", {"below": 0.5}, min_samples=200), noisy(199))) == {None}


def test_gain_downwards_is_that_of_the_series_upside_down() -> None:
    values = [x - i / 100 for i, x in enumerate(noisy(300, level=5.0))]
    down = scores(condition("gain", {"below": 0.5, "direction": "down"}, min_samples=8), values)
    up = scores(condition("gain", {"below": 0.5}, min_samples=8), [-x for x in values])
    assert down == up


def test_rebound_divides_the_level_by_the_lowest_so_far() -> None:
    found = scores(condition("rebound", {"above": 1.05}), [10, 8, 5, 6, 10])
    assert found[1:] == [1.0, 1.0, 1.2, 2.0]


def test_rebound_smooths_over_an_eighth_of_all_samples() -> None:
    """A single sample out of 400 moves no median; out of four it is a quarter of what is known."""
    long = [4.0 - i / 200 for i in range(400)]
    assert max(scores(condition("rebound", {"above": 1.05}), [*long, 40.0])[1:]) < 1.05
    assert scores(condition("rebound", {"above": 1.05}), [4.0, 3.0, 2.0, 40.0])[-1] == 20.0


def test_rebound_says_nothing_while_one_of_its_demands_is_not_met() -> None:
    rising = [1.0 + i for i in range(40)]
    assert set(scores(condition("rebound", {"above": 2, "fell": "5%"}), rising)[1:]) == {1.0}
    assert scores(condition("rebound", {"above": 1.05, "behind": "40%"}), [10, 8, 5, 6])[-1] == 1.0
    noisy = [5.0, 4.0, 6.0, 4.0, 6.0, 4.0, 6.0, 4.0, 6.0]
    assert max(scores(condition("rebound", {"above": 1.05, "sigmas": 3}), noisy)[1:]) == 1.0


def test_rebound_takes_rounded_values_for_no_quieter_than_they_are() -> None:
    solved = [0.7 * 0.85**i for i in range(48)]
    rounded = [0.0003, 0.0003, 0.0002, 0.0003, 0.0003, 0.0003, 0.06, 0.0003] * 12
    low, high = [0.0002] * 40, [0.0003, 0.0003, 0.0004] * 14
    found = scores(condition("rebound", {"above": 1.05, "sigmas": 5}), [*solved, *rounded, *low, *high])
    assert max(found[60:]) == 1.0


def swinging(rise: float, back: bool = True) -> list[float]:
    """A loss without noise that falls from 1 to 0.015 faster and faster, and swings up again by momentum, or stays up."""
    down = [exp(-0.012 * i**1.85) for i in range(24)]
    up = [down[-1] + (rise - down[-1]) * sin(pi / 2 * i / 5) for i in range(1, 6)]
    after = [rise * 0.75**i for i in range(1, 12)] if back else [rise * 1.02**i for i in range(40)]
    return [*down, *up, *after]


def test_rebound_leaves_a_swing_near_zero_time_to_come_back() -> None:
    rule = {"above": 1.05, "sigmas": 5, "fell": "5%"}
    assert max(scores(condition("rebound", rule), swinging(0.07))[1:]) == 1.0
    stays = scores(condition("rebound", rule), swinging(0.07, back=False))
    assert [score for score in stays[1:40] if score > 1.0] == []
    assert stays[-1] > 3.0
    assert max(scores(condition("rebound", rule), swinging(0.5, back=False))[24:40]) > 3.0


def taking_turns(seed: int, *, levels: tuple[float, ...], diverges: bool = False) -> list[float]:
    """Tasks drawn at random, each with a loss of its own that falls; from sample 120 on all may blow up."""
    draw, losses = random.Random(seed), []
    for i in range(220):
        level = draw.choice(levels) * exp(-0.004 * min(i, 120)) * (1.5 ** max(0, i - 120) if diverges else 1.0)
        losses.append(level * exp(draw.gauss(0, 0.05)))
    return losses


@pytest.mark.parametrize("levels", [(0.1, 4.0), (1.0, 1.4), (0.02, 1.0, 1.0, 50.0)], ids=str)
def test_rebound_does_not_take_tasks_that_take_turns_for_a_rise(levels: tuple[float, ...]) -> None:
    rule = {"above": 1.05, "sigmas": 5, "fell": "5%"}
    healthy = [
        max(s or 1 for s in scores(condition("rebound", rule), taking_turns(n, levels=levels))) for n in range(20)
    ]
    assert sum(highest > 1.0 for highest in healthy) <= 3
    bad = [scores(condition("rebound", rule), taking_turns(n, levels=levels, diverges=True)) for n in range(20)]
    assert sum(max(s or 1 for s in found) > 1.05 for found in bad) >= 18


def test_rebound_does_not_judge_what_has_been_negative() -> None:
    assert scores(condition("rebound", {"above": 1.05}), [5, 4, -1, 3, 9]) == [None, 1.0, None, None, None]
    assert scores(condition("rebound", {"above": 1.05}), [5, 4, 0, 4, 8])[2:] == [None, 1.0, 2.0]


def test_unchanged_can_ask_for_longer_than_it_ever_stood_before() -> None:
    held = [1.0] * 4 + [2.0] * 4 + [3.0] * 14
    found = scores(condition("unchanged", {"over": 2, "times": 3}), held)
    assert found[:4] == [None, 1.0, 2.0, 3.0]  # nothing before it to compare with
    assert found[4:17] == [0.0] * 13
    assert found[17:] == [9.0, 10.0, 11.0, 12.0, 13.0]


def test_unchanged_can_take_what_lies_near_the_first_value_for_equal_to_it() -> None:
    found = scores(condition("unchanged", {"over": 2, "within": "1%"}), [1.0, 1.005, 0.995, 1.2, 1.205, 1.2])
    assert found == [None, 1.0, 2.0, 0.0, 0.0, 0.0]


def test_unchanged_can_leave_out_what_stays_at_its_best() -> None:
    at_its_best = scores(condition("unchanged", {"over": 2, "best": "max"}), [1.0, 5.0, 5.0, 5.0])
    lost = scores(condition("unchanged", {"over": 2, "best": "max"}), [1.0, 5.0, 2.0, 2.0, 2.0])
    from_the_start = scores(condition("unchanged", {"over": 2, "best": "max"}), [1.0, 1.0, 1.0])
    assert (at_its_best[-1], lost[-1], from_the_start[-1]) == (0.0, 2.0, 2.0)


def best_share(values, min_samples=100, **options):
    """The last score of ``superiority``."""
    return scores(condition("superiority", {"below": 0.55, **options}, min_samples=min_samples), list(values))[-1]


def test_superiority_needs_no_scale_and_no_shape() -> None:
    """A few enormous values, many ties and another sign change nothing in who is better than whom."""
    flat = noisy(400, level=0.0)
    risen = [*noisy(200, level=0.0), *noisy(200, level=1.0, seed=1)]
    for values, low, high in ((flat, 0.45, 0.58), (risen, 0.95, 1.0)):
        found = best_share(values)
        assert found is not None
        assert low <= found <= high
        assert best_share([math.exp(9 * v) - 50 for v in values]) == pytest.approx(found, abs=1e-9)
        assert best_share([-v for v in values], direction="down") == pytest.approx(found, abs=1e-9)


def test_superiority_counts_a_level_that_was_reached_and_lost() -> None:
    lost = [*noisy(150, level=0.0), *noisy(120, level=2.0), *noisy(130, level=0.0, seed=1)]
    found = best_share(lost)
    assert found is not None
    assert found > 0.9


def test_superiority_waits_for_independent_samples() -> None:
    """A running mean of a thousand rows may be a handful of episodes: it has neither risen nor is that long."""
    noise, mean = noisy(2000, level=0.0), []
    at = 0.0
    for value in noise:
        at += 0.005 * (value - at)
        mean.append(at)
    assert best_share(noise, 400) is not None
    found = best_share(mean[:600], 400)
    assert found is None or found >= 0.7
    assert best_share([0.25] * 500, 400) is None


def test_unchanged_waits_longer_for_a_reward_that_has_not_been_found() -> None:
    """0 so far, or the cost of every step until the time is up: a goal may only not have been reached yet."""

    def longest(values: list[float]) -> float:
        found = scores(condition("unchanged", {"over": 2, "sparse": 4}), values)
        return max(score for score in found if score is not None)

    assert longest([0.0] * 9) == 2.0
    assert longest([-200.0] * 9) == 2.0
    assert longest([1.0] * 9) == 8.0
    assert longest([-17.5] * 9) == 8.0
    assert longest([0.0, 0.0, 1.0, *[0.0] * 9]) == 8.0  # it had been found


def test_superiority_goes_by_when_rare_rewards_came() -> None:
    """One success in fifty is no better quarter by ranks. Where most came late they have become more frequent."""
    rising, even, falling = ([0.0] * 400 for _ in range(3))
    for at in (250, 330, 370, 390):
        rising[at] = 1.0
    for at in (50, 150, 250, 350):
        even[at] = 1.0
    for at in (10, 30, 70, 150):
        falling[at] = 1.0
    assert best_share(rising) is None
    for values in (even, falling):
        found = best_share(values)
        assert found is not None
        assert found < 0.55
    assert best_share([-v for v in rising], direction="down") is None
