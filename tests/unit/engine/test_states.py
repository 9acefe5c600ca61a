"""States, episodes and hysteresis: rule-language 5.2."""

from __future__ import annotations

import pytest

nan = float("nan")
inf = float("inf")


def test_for_n_fires_at_the_nth_breach_in_a_row_and_clears_after_as_many_good_samples(bench):
    b = bench("external: [x]\nrules: {high: {metric: x, when: {above: 1}, for: 3}}")
    b.series("x", [0, 2, 2, 0, 2, 2, 2, 2, 0, 0, 0])
    assert b.fired("high") == [7]
    assert b.cleared("high") == [11]


def test_k_of_n_tolerates_gaps_between_breaches(bench):
    b = bench("external: [x]\nrules: {high: {metric: x, when: {above: 1}, for: 3 of 5}}")
    b.series("x", [0, 2, 0, 2, 2, 0, 0, 0, 0])
    assert b.fired("high") == [5]


def test_a_duration_counts_active_time_and_pauses_while_samples_are_missing(bench):
    b = bench("external: [x]\nrules: {high: {metric: x, when: {above: 1}, for: 30s}}")
    for step, now in enumerate([0, 10, 20, 29, 30], 1):
        b.step(step, now=now, x=2)
    assert b.fired("high") == [5]


def test_recover_keeps_an_alert_open_between_the_two_thresholds(bench):
    b = bench("external: [x]\nrules: {high: {metric: x, when: {above: 0.9}, recover: {below: 0.8}}}")
    b.series("x", [0.95, 0.85, 0.85, 0.95, 0.85, 0.7])
    assert b.fired("high") == [1]
    assert b.cleared("high") == [6]


def test_missing_samples_neither_fire_nor_clear(bench):
    b = bench("external: [x]\nrules: {high: {metric: x, when: {above: 1}, for: 2}}")
    b.series("x", [2, None, None, 2, None, None, None])
    assert b.fired("high") == [4]
    assert b.cleared("high") == [None]


def test_a_rule_learns_during_warmup_but_cannot_fire(bench):
    b = bench("external: [x]\nrules: {high: {metric: x, when: {above: 1}, warmup: 5}}")
    b.series("x", [9, 9, 9, 9, 9, 9])
    assert b.fired("high") == [6]


def test_warmup_counts_from_the_resume_step_without_restored_state(bench):
    b = bench("external: [x]\nrules: {high: {metric: x, when: {above: 1}, warmup: 5}}", start_step=100)
    b.series("x", [9] * 7, start=101)
    assert b.fired("high") == [106]


def test_every_evaluates_when_a_multiple_has_been_passed(bench):
    b = bench("external: [x]\nrules: {high: {metric: x, when: {above: 1}, every: 1000}}")
    for step in (500, 1000, 1500, 2500):
        b.step(step, x=2 if step != 1000 else 0)
    assert b.fired("high") == [2500]
    assert b.engine.by_id["high"].samples == 2


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_a_non_finite_sample_breaches_whichever_way_the_comparator_points(bench, value):
    b = bench("external: [x]\nrules: {high: {metric: x, when: {above: 1}}, low: {metric: x, when: {below: -1}}}")
    b.series("x", [0, value, 0])
    assert b.fired("high") == [2]
    assert b.fired("low") == [2]


def test_a_nonfinite_rule_owns_such_samples_so_that_one_event_is_one_alert(bench):
    b = bench("""
        rules:
          loss-not-finite: {metric: loss, when: nonfinite}
          loss-high: {metric: loss, when: {above: 5}}
    """)
    b.series("loss", [1, nan, 1, 9])
    assert b.fired("loss-not-finite") == [2]
    assert b.fired("loss-high") == [4]


def test_a_nan_never_enters_a_window_and_does_not_blind_the_spike_rule(bench):
    b = bench("""
        rules:
          loss-not-finite: {metric: loss, when: nonfinite}
          loss-spike: {metric: loss, when: {robust_z: {above: 8, window: 200}}}
    """)
    values = [2.0 + 0.05 * ((i * 7919) % 13 - 6) / 6 for i in range(300)]
    b.series("loss", [*values[:150], nan, *values[150:200], 20.0, *values[200:]])
    assert b.fired("loss-not-finite") == [151]
    assert b.fired("loss-spike") == [202]


def test_many_series_that_breach_at_once_are_one_alert_with_the_worst_five(bench):
    b = bench("rules: {big: {metric: 'grad_norm[*]', when: {above: 1}}}")
    result = b.family(1, "grad_norm", {f"layer{i}.weight": float(i) for i in range(10)})
    assert len(result.alerts) == 1
    alert = result.alerts[0]
    assert alert.count == 8
    assert [f.name for f in alert.series] == [f"grad_norm[layer{i}.weight]" for i in (9, 8, 7, 6, 5)]


def test_an_alert_of_a_family_clears_when_its_last_series_has(bench):
    b = bench("rules: {big: {metric: 'grad_norm[*]', when: {above: 1}}}")
    b.family(1, "grad_norm", {"a": 2.0, "b": 2.0})
    b.family(2, "grad_norm", {"a": 0.0, "b": 2.0})
    assert b.cleared("big") == [None]
    b.family(3, "grad_norm", {"a": 0.0, "b": 0.0})
    assert b.cleared("big") == [3]


def test_except_removes_series_and_a_plain_name_does_not_match_a_family(bench):
    b = bench("""
        rules:
          weights: {metric: 'grad_norm[*]', except: ['*.bias'], when: {above: 1}}
          total: {metric: grad_norm, when: {above: 1}}
    """)
    b.family(1, "grad_norm", {"a.bias": 5.0, "a.weight": 0.5})
    assert b.fired("weights") == []
    assert b.fired("total") == []
    b.family(2, "grad_norm", {"": 5.0})
    assert b.fired("total") == [2]


def test_the_run_remembers_an_episode_that_recovered(bench):
    from healthcheck.core.alerts import Missing, Outcome
    from healthcheck.engine.summary import verdicts

    b = bench("external: [x]\nrules: {high: {metric: x, when: {above: 1}, severity: error}}")
    b.series("x", [0, 2, 0, 0])
    (verdict,) = verdicts(b.engine, lambda rule: Missing(""))
    assert verdict.outcome is Outcome.FAILED
    assert verdict.closest == 2
    assert verdict.closest_step == 2


def test_no_data_and_warming_are_not_judged_and_say_why(bench):
    from healthcheck.core.alerts import Missing, Outcome
    from healthcheck.engine.summary import verdicts

    b = bench("""
        external: [x, y]
        rules:
          warm: {metric: x, when: {above: 1}, warmup: 100}
          gone: {metric: y, when: {above: 1}}
    """)
    b.series("x", [0, 0, 0])
    warm, gone = verdicts(b.engine, lambda rule: Missing(f"nothing logged {rule.selector.metric}"))
    assert (warm.outcome, gone.outcome) == (Outcome.NOT_JUDGED, Outcome.NOT_JUDGED)
    assert "warming up" in warm.reason
    assert gone.reason == "nothing logged y"


def test_a_guarded_rule_judges_its_first_sample_whatever_its_step(bench):
    """Records begin at step 0, which is also where a run that was not resumed starts."""
    b = bench(
        "external: [a, g]\nrules: {r: {metric: a, when: {above: 1}, only_if: {g: 0}}}",
    )
    b.step(0, a=5.0, g=0.0)
    assert b.fired("r") == [0]


def test_a_note_does_not_take_a_pass_away_and_a_warning_does(bench):
    from healthcheck.core.alerts import Missing, Outcome
    from healthcheck.engine.summary import verdicts

    b = bench("""
        external: [x]
        rules:
          note: {metric: x, when: {above: 1}, severity: info}
          warn: {metric: x, when: {above: 1}}
    """)
    b.series("x", [0, 2])
    note, warn = verdicts(b.engine, lambda rule: Missing(""))
    assert (note.outcome, note.episodes) == (Outcome.OK, 1)
    assert (warn.outcome, warn.episodes) == (Outcome.WARNED, 1)


def test_a_guard_goes_by_the_newest_value_whatever_phase_it_came_in(bench):
    b = bench("external: [a, g]\nrules: {r: {metric: a, when: {above: 1}, only_if: {g: 1}}}")
    for step in (1, 2, 3):
        b.step(step, a=0.0, g=1.0)
        b.step(step, g=0.0, phase="eval")
        b.step(step, a=5.0)
    assert b.fired("r") == []
    b.step(4, a=5.0, g=1.0)
    assert b.fired("r") == [4]


@pytest.mark.parametrize(
    ("when", "values", "closest", "step"),
    [
        ("{above: 8}", [1, 7, 3], 7, 2),
        ("{below: 1}", [4, 7, 3], 3, 3),
        ("{outside: [0, 10]}", [5, 1.5, 8, 4], 1.5, 2),
        ("{outside: [0, 10]}", [5, 2, 9, -0.5], -0.5, 4),
        ("{equals: 0}", [0.3, -0.1, 0.2, 4], -0.1, 2),
    ],
)
def test_the_closest_approach_is_to_the_nearest_limit(bench, when, values, closest, step):
    """Also where both ends are limits: it says how near a healthy run came."""
    b = bench(f"external: [x]\nrules: {{r: {{metric: x, when: {when}}}}}")
    b.series("x", values)
    assert b.engine.by_id["r"].closest == (closest, step)


def test_an_alert_names_the_series_first_that_breaches_by_most(bench):
    b = bench("external: [w]\nrules: {r: {metric: 'w[*]', when: {outside: [0, 10]}}}")
    b.family(1, "w", {"a": 11.0, "b": -7.0, "c": 13.0, "d": 5.0, "e": float("nan")})
    (alert,) = b.engine.alerts
    assert [fact.name for fact in alert.series] == ["w[e]", "w[b]", "w[c]", "w[a]"]


FLIPS = "external: [x]\nrules: {high: {metric: x, when: {above: 1}%s}}"


def test_a_value_that_flips_around_its_threshold_is_told_ever_more_rarely(bench):
    b = bench(FLIPS % "")
    b.series("x", [0, 2, 0, 0, 0] * 100)
    assert b.fired("high") == [2, 7, 12, 17]  # away for 1 sample twice, for 4, for 16, of which there are never so many
    b.series("x", [*[0] * 16, 2], start=501)
    assert b.cleared("high")[:4] == [3, 8, 16, 513]
    assert b.fired("high")[4:] == [517]


def test_the_first_two_recoveries_are_as_quick_as_ever(bench):
    b = bench(FLIPS % ", for: 2")
    b.series("x", [2, 2, 0, 0, 0, *[2, 2, 0, 0, 0] * 2, *[0] * 8])
    assert (b.fired("high"), b.cleared("high")) == ([2, 7, 12], [4, 9, 20])


def test_facts_and_what_acts_on_a_run_are_taken_one_by_one(bench):
    for more in (", kind: fact", ", then: [stop]"):
        b = bench(FLIPS % more)
        b.series("x", [0, 2] * 20)
        assert len(b.fired("high")) == 20


def test_a_resumed_run_remembers_how_often_a_value_has_flipped(bench):
    first = bench(FLIPS % "")
    first.series("x", [0, 2, 0, 2, 0, 2])
    again = bench(FLIPS % "", start_step=6)
    assert again.engine.load_state_dict(first.engine.state_dict()) == []
    again.series("x", [0, 0, 2, 0, 0, 0, 0, 2], start=7)
    assert again.fired("high") == [14]
