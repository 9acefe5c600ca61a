"""What leaves the engine: explanations, mutes, cooldown, action plans."""

from __future__ import annotations

nan = float("nan")


def test_an_explained_alert_is_recorded_and_its_actions_are_held(bench):
    b = bench("""
        external: [x, y]
        rules:
          symptom: {metric: x, when: {above: 1}, then: [warn]}
          cause: {metric: y, when: {above: 1}, explains: [symptom], then: [warn]}
    """)
    b.step(1, x=2, y=2)
    symptom, cause = b.engine.alerts
    assert symptom.explained_by == "cause"
    assert cause.explained_by == ""
    assert b.actions() == [("symptom", "warn", "explained by cause"), ("cause", "warn", "")]


def test_a_muted_span_is_judged_and_recorded_but_nothing_is_done(bench):
    b = bench("""
        external: [x]
        mute: [{rule: high, steps: 2..3, reason: new data mix}]
        rules: {high: {metric: x, when: {above: 1}, then: [warn]}}
    """)
    b.series("x", [0, 2, 0, 2])
    assert [a.muted for a in b.engine.alerts] == ["new data mix", ""]
    assert [held for _, _, held in b.actions()] == ["muted: new data mix", ""]
    assert b.engine.mute_hits == {0: 1}


def test_actions_run_once_per_episode_and_repeat_only_with_a_cooldown(bench):
    b = bench("""
        external: [x]
        rules:
          once: {metric: x, when: {above: 1}, then: [warn]}
          often: {metric: x, when: {above: 1}, cooldown: 3, then: [warn]}
    """)
    b.series("x", [2] * 7)
    assert [r for r, _, held in b.actions() if not held] == ["once", "often", "often", "often"]
    assert len(b.engine.alerts) == 2


def test_a_new_episode_within_the_cooldown_is_recorded_with_its_actions_held(bench):
    b = bench("external: [x]\nrules: {high: {metric: x, when: {above: 1}, cooldown: 10, then: [warn]}}")
    b.series("x", [2, 0, 2])
    assert b.fired("high") == [1, 3]
    assert [held for _, _, held in b.actions()] == ["", "within the cooldown of 10 steps"]


def test_after_counts_action_runs_over_episodes(bench):
    b = bench(
        "external: [x]\nrules: {high: {metric: x, when: {above: 1}, severity: error, then: [warn, {stop: {after: 2}}]}}"
    )
    b.series("x", [2, 0, 2])
    assert [(name) for _, name, _ in b.actions()] == ["warn", "warn", "stop"]


def test_only_if_freezes_a_rule_while_its_guard_fails_and_an_unseen_guard_counts_as_satisfied(bench):
    b = bench("rules: {g: {metric: grad_norm, when: nonfinite, only_if: {amp.skipped: 0}}}")
    b.step(1, grad_norm=nan)
    assert b.fired("g") == [1]
    b.step(2, grad_norm=1.0)
    b.step(3, amp__skipped=1, grad_norm=nan)
    b.step(4, amp__skipped=1)
    assert b.fired("g") == [1]
    b.step(5, amp__skipped=0, grad_norm=nan)
    assert b.fired("g") == [1, 5]


def test_in_a_record_that_cannot_know_the_guard_an_error_is_a_note(bench):
    b = bench(
        "rules: {g: {metric: grad_norm, when: nonfinite, severity: error, only_if: {amp.skipped: 0}}}", recorded=True
    )
    b.step(1, grad_norm=nan)
    assert str(b.engine.alerts[0].severity) == "info"


def test_a_derived_metric_appears_only_where_all_its_bare_inputs_do(bench):
    b = bench("""
        metrics: {overfit_gap: '(eval.loss - ewma(loss, 20)) / ewma(loss, 20)'}
        rules: {overfit: {metric: overfit_gap, when: {above: 0.25}, for: 2, severity: warning}}
    """)
    for step in range(1, 31):
        b.step(step, loss=1.0)
        if step % 10 == 0:
            b.step(step, phase="eval", eval__loss=1.5)
    assert b.fired("overfit") == [20]


def test_an_undefined_ratio_gives_no_sample(bench):
    b = bench("metrics: {r: loss / lr}\nrules: {r-high: {metric: r, when: {above: 0.5}}}")
    b.step(1, loss=1.0, lr=0.0)
    assert b.fired("r-high") == []
    b.step(2, loss=1.0, lr=1.0)
    assert b.fired("r-high") == [2]


def test_missing_fires_when_a_metric_stays_away(bench):
    b = bench("rules: {gone: {metric: eval.loss, when: {missing: 6}}}")
    b.step(1, phase="eval", eval__loss=1.0)
    for step in range(2, 9):
        b.step(step, loss=1.0)
    assert b.fired("gone") == [7]
    b.step(9, phase="eval", eval__loss=1.0)
    b.step(10, loss=1.0)
    assert b.cleared("gone") != [None]


def test_stale_is_judged_by_the_watchdog_and_has_its_own_startup_budget(bench):
    b = bench("rules: {hang: {metric: heartbeat, when: {stale: {after: 300s, first: 30m}}, severity: error}}")
    assert not b.engine.tick(900, 900).alerts
    b.step(1, heartbeat=1)
    assert not b.engine.tick(200, 200).alerts
    assert [a.rule for a in b.engine.tick(301, 301).alerts] == ["hang"]
    assert not b.engine.tick(400, 400).alerts


def test_outlier_compares_each_series_with_the_median_of_its_siblings(bench):
    b = bench("rules: {straggler: {metric: 'time.step[rank=*]', when: {outlier: {above: 1.3, across: rank}}}}")
    result = b.family(1, "time.step", {"0": 1.0, "1": 1.1, "2": 1.0, "3": 1.9}, label="rank")
    assert [f.name for f in result.alerts[0].series] == ["time.step[rank=3]"]


def test_all_needs_every_part_and_parts_may_watch_other_metrics(bench):
    b = bench("""
        external: [x, y]
        rules:
          both: {metric: x, when: {all: [{above: 1}, {metric: y, above: 10}]}}
          either: {metric: x, when: {any: [{above: 1}, {metric: y, above: 10}]}}
    """)
    b.step(1, x=2, y=0)
    assert b.fired("both") == []
    assert b.fired("either") == [1]
    b.step(2, x=2, y=11)
    assert b.fired("both") == [2]


def test_a_stale_metric_is_silent_since_its_own_last_sample(bench):
    b = bench("external: [reward]\nrules: {quiet: {metric: reward, when: {stale: 60s}}}")
    b.step(1, now=0, reward=1)
    b.step(2, now=50, loss=1)
    assert not b.engine.tick(0.0, 55).alerts
    assert [a.rule for a in b.engine.tick(0.0, 61).alerts] == ["quiet"]


def test_a_guard_may_ask_that_a_metric_is_absent(bench):
    b = bench(
        "external: [reward]\nrules: {g: {metric: loss, when: {above: 5}, severity: error, only_if: {reward: absent}}}"
    )
    b.step(1, loss=9.0)
    assert b.fired("g") == [1]
    rl = bench("external: [reward]\nrules: {g: {metric: loss, when: {above: 5}, only_if: {reward: absent}}}")
    rl.step(1, loss=1.0, reward=0.5)
    rl.step(2, loss=9.0)
    assert rl.fired("g") == []


def test_derived_metrics_may_build_on_each_other(bench):
    b = bench("""
        metrics: {twice: loss * 2, more: twice + 1}
        rules: {m: {metric: more, when: {above: 5}}}
    """)
    b.step(1, loss=1.0)
    assert b.fired("m") == []
    b.step(2, loss=3.0)
    assert b.fired("m") == [2]
