"""One rule, several causes: one alert per episode, the most certain one speaks, nothing that must happen is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healthcheck.core.alerts import Missing, Severity
from healthcheck.engine.engine import Engine
from healthcheck.engine.summary import verdicts
from healthcheck.rulelang.rule import Cause

PART = """
    external: [a, b, c, d, e]
    rules:
      part:
        severity: warning
        tags: [weights]
        causes:
          orphan: {kind: fact, metric: a, when: {above: 0}, severity: error, then: [warn, stop], message: "orphan at {step}"}
          left-out: {metric: b, when: {above: 0}, then: [warn, evidence], message: left out}
          frozen: {kind: trend, metric: c, when: {above: 0}, message: frozen}
"""


def alerts(b: Any) -> list[Any]:
    return list(b.engine.alerts)


def test_an_episode_goes_from_the_first_cause_that_fires_until_all_have_recovered(bench: Callable[..., Any]) -> None:
    b = bench(PART)
    b.step(1, a=0, b=0, c=1)
    b.step(2, a=0, b=1, c=1)
    b.step(3, a=0, b=1, c=0)
    assert [(x.fired_step, x.cleared_step) for x in alerts(b)] == [(1, None)]
    b.step(4, a=0, b=0, c=0)
    assert [(x.fired_step, x.cleared_step) for x in alerts(b)] == [(1, 4)]
    b.step(5, a=0, b=0, c=1)
    assert [x.episode for x in alerts(b)] == [1, 2]


def test_a_more_certain_cause_that_fires_later_speaks_from_then_on(bench: Callable[..., Any]) -> None:
    b = bench(PART)
    b.step(1, c=1)
    (alert,) = alerts(b)
    assert (alert.name, alert.message, alert.severity) == ("part.frozen", "frozen", Severity.WARNING)
    found = b.step(3, a=1, c=1)
    assert found.amended == [alert]
    assert found.alerts == []
    assert (alert.name, alert.message, alert.severity) == ("part.orphan", "orphan at 3", Severity.ERROR)
    assert (alert.fired_step, alert.cause_step) == (1, 3)
    assert [(c.step, c.before, c.after) for c in alert.changes] == [(3, "frozen", "orphan")]
    assert [f.cause for f in alert.also] == ["frozen"]


def test_a_less_certain_cause_that_fires_later_stands_beside_it(bench: Callable[..., Any]) -> None:
    b = bench(PART)
    b.step(1, a=1)
    b.step(2, a=1, b=1, c=1)
    (alert,) = alerts(b)
    assert alert.cause == "orphan"
    assert alert.changes == []
    assert [f.cause for f in alert.also] == ["left-out", "frozen"]


def test_an_action_runs_once_an_episode_and_a_later_cause_runs_those_of_its_own_that_have_not_run(
    bench: Callable[..., Any],
) -> None:
    b = bench(PART)
    b.step(1, c=1)
    b.step(2, b=1, c=1)
    b.step(3, a=1, b=1, c=1)
    b.step(4, a=1, b=1, c=1)
    assert [(p.cause.name, p.spec.name) for r in b.results for p in r.plan] == [
        ("frozen", "warn"),
        ("left-out", "evidence"),
        ("orphan", "stop"),
    ]


def test_an_action_that_could_not_run_is_asked_for_again_by_a_later_cause(bench: Callable[..., Any]) -> None:
    b = bench(PART)
    for planned in b.step(1, c=1).plan:
        planned.not_done()
    assert [p.spec.name for p in b.step(2, b=1, c=1).plan] == ["warn", "evidence"]


def test_cooldown_and_after_count_for_the_rule(bench: Callable[..., Any]) -> None:
    b = bench("""
        external: [a, b]
        rules:
          r:
            cooldown: 10
            causes:
              one: {metric: a, when: {above: 0}, then: [warn, {evidence: {}}]}
              two: {metric: b, when: {above: 0}, severity: error, then: [warn, stop, {checkpoint: {after: 2}}]}
    """)
    b.step(1, a=1, b=0)
    b.step(2, a=0, b=0)
    b.step(3, a=0, b=1)
    plan = [(p.cause.name, p.spec.name, p.held) for r in b.results for p in r.plan]
    within = "within the cooldown of 10 steps"
    assert plan == [
        ("one", "warn", ""),
        ("one", "evidence", ""),
        ("two", "warn", within),
        ("two", "stop", ""),
        ("two", "checkpoint", ""),
    ], "the cooldown holds what has just run; what has not is never held by it, and it is the second run of the rule"


def test_a_series_that_joins_while_the_cause_fires_belongs_to_the_episode(bench: Callable[..., Any]) -> None:
    b = bench("rules: {r: {metric: 'grad_norm[*]', when: {above: 1}}}")
    b.family(1, "grad_norm", {"l0": 2.0, "l1": 0.0})
    b.family(2, "grad_norm", {"l0": 2.0, "l1": 3.0})
    (alert,) = alerts(b)
    assert alert.count == 2
    assert {fact.name for fact in alert.series} == {"grad_norm[l0]", "grad_norm[l1]"}
    b.family(3, "grad_norm", {"l0": 0.0, "l1": 3.0})
    assert alert.cleared_step is None
    b.family(4, "grad_norm", {"l0": 0.0, "l1": 0.0})
    assert alert.cleared_step == 4


# -- mutes --------------------------------------------------------------------------------


def test_a_mute_of_a_cause_hides_that_cause_alone(bench: Callable[..., Any]) -> None:
    b = bench(PART.replace("rules:", "mute: [{rule: part.orphan, reason: known}]\n    rules:", 1))
    b.step(1, a=1, b=0)
    (alert,) = alerts(b)
    assert (alert.muted, alert.counts) == ("known", False)
    assert [p.held for r in b.results for p in r.plan] == ["muted: known", "muted: known"]
    b.step(2, a=1, b=1)
    assert (alert.cause, alert.muted, alert.counts) == ("left-out", "", True)
    assert alert.severity is Severity.WARNING, "what is muted does not make it more severe"
    assert [p.spec.name for p in b.results[-1].plan if not p.held] == ["warn", "evidence"]


def test_a_mute_that_is_over_does_not_hide_what_fires_anew(bench: Callable[..., Any]) -> None:
    b = bench("""
        mute: [{rule: r, steps: 1..2, reason: known}]
        rules: {r: {metric: 'grad_norm[*]', when: {above: 1}, then: [warn]}}
    """)
    b.family(1, "grad_norm", {"l0": 2.0, "l1": 0.0})
    found = b.family(3, "grad_norm", {"l0": 2.0, "l1": 3.0})
    (alert,) = alerts(b)
    assert alert.muted == ""
    assert [(p.spec.name, p.held) for p in found.plan] == [("warn", "")]


# -- what holds an alert back ----------------------------------------------------------------

HELD = """
    external: [a, b, c, d]
    rules:
      fact: {kind: fact, tags: [loss, core], metric: a, when: {above: 0}, severity: warning}
      curve: {kind: trend, tags: [loss], metric: b, when: {above: 0}, then: [warn, evidence, skip_update, stop], SEVERITY}
      other: {kind: trend, tags: [gradients, core], metric: c, when: {above: 0}}
      level: {tags: [loss], metric: d, when: {above: 0}}
"""


def held(b: Any) -> dict[str, str]:
    return {alert.rule: alert.explained_by for alert in b.engine.alerts}


def test_a_fact_holds_back_trends_about_the_same_that_begin_with_it_or_after(bench: Callable[..., Any]) -> None:
    b = bench(HELD.replace("SEVERITY", "severity: warning"))
    b.step(1, a=1, c=1, d=1)
    b.step(2, a=1, b=1, c=1, d=1)
    assert held(b) == {"fact": "", "curve": "fact", "other": "", "level": ""}, "other subjects and measures are not"


def test_what_began_before_keeps_its_block(bench: Callable[..., Any]) -> None:
    b = bench(HELD.replace("SEVERITY", "severity: warning"))
    b.step(1, a=0, b=1)
    b.step(2, a=1, b=1)
    assert held(b) == {"curve": "", "fact": ""}


def test_a_fact_that_has_recovered_holds_nothing_back(bench: Callable[..., Any]) -> None:
    b = bench(HELD.replace("SEVERITY", "severity: warning"))
    b.step(1, a=1, b=0)
    b.step(2, a=0, b=0)
    b.step(3, a=0, b=1)
    assert held(b) == {"fact": "", "curve": ""}


def test_only_observing_actions_are_held_back(bench: Callable[..., Any]) -> None:
    b = bench(HELD.replace("SEVERITY", "severity: warning"))
    b.step(1, a=1, b=1)
    assert [(p.spec.name, bool(p.held)) for p in b.results[-1].plan if p.cause.rule == "curve"] == [
        ("warn", True),
        ("evidence", True),
        ("skip_update", False),
        ("stop", False),
    ]


def test_an_alert_of_higher_severity_is_never_held_back(bench: Callable[..., Any]) -> None:
    b = bench(HELD.replace("SEVERITY", "severity: error"))
    b.step(1, a=1, b=1)
    assert held(b) == {"fact": "", "curve": ""}


def test_an_alert_that_becomes_more_severe_comes_to_light_with_what_was_held(bench: Callable[..., Any]) -> None:
    b = bench("""
        external: [a, b, c]
        rules:
          fact: {kind: fact, tags: [loss], metric: a, when: {above: 0}}
          r:
            tags: [loss]
            causes:
              bad: {kind: trend, metric: c, when: {above: 0}, severity: error}
              mild: {kind: trend, metric: b, when: {above: 0}, then: [evidence]}
    """)
    b.step(1, a=1, b=1, c=0)
    assert held(b) == {"fact": "", "r": "fact"}
    found = b.step(2, a=1, b=1, c=1)
    assert held(b) == {"fact": "", "r": ""}
    assert [(p.cause.name, p.spec.name, p.held) for p in found.plan] == [("bad", "warn", ""), ("mild", "evidence", "")]


def test_what_is_muted_holds_nothing_back(bench: Callable[..., Any]) -> None:
    b = bench(
        HELD.replace("SEVERITY", "severity: warning").replace(
            "rules:", "mute: [{rule: fact, reason: known}]\n    rules:"
        )
    )
    b.step(1, a=1, b=1)
    assert held(b) == {"fact": "", "curve": ""}, "one of the two must be seen"


def test_holds_back_names_kinds_and_tags_of_what_is_less_certain(bench: Callable[..., Any]) -> None:
    b = bench("""
        external: [a, b, c, d]
        rules:
          holder: {metric: a, when: {above: 0}, holds_back: [trend, core]}
          curve: {kind: trend, metric: b, when: {above: 0}}
          level: {metric: c, tags: [core], when: {above: 0}}
          fact: {kind: fact, metric: d, tags: [core], when: {above: 0}}
    """)
    b.step(1, a=1, b=1, c=1, d=1)
    assert held(b) == {"holder": "", "curve": "holder", "level": "", "fact": ""}


def test_two_rules_never_hide_each_other(bench: Callable[..., Any]) -> None:
    b = bench("""
        external: [a, b]
        rules:
          curve: {kind: trend, tags: [loss], metric: a, when: {above: 0}, explains: [fact]}
          fact: {kind: fact, tags: [loss], metric: b, when: {above: 0}}
    """)
    b.step(1, a=1, b=1)
    assert sorted(held(b).values()) in (["", "curve"], ["", "fact"])


def test_a_rule_may_explain_one_cause_of_another(bench: Callable[..., Any]) -> None:
    b = bench("""
        external: [a, b, c]
        rules:
          why: {metric: a, when: {above: 0}, explains: [r.one]}
          r:
            causes:
              one: {metric: b, when: {above: 0}}
              two: {metric: c, when: {above: 0}}
    """)
    b.step(1, a=1, b=1, c=0)
    assert held(b) == {"why": "", "r": "why"}
    b.step(2, a=1, b=1, c=1)
    assert held(b) == {"why": "", "r": ""}, "it is explained only as long as all that was found is"


def nothing_missing(cause: Cause) -> Missing:
    return Missing("")


# -- verdicts ---------------------------------------------------------------------------------


def test_a_rule_is_ok_only_if_every_cause_was_judged(bench: Callable[..., Any]) -> None:
    b = bench(PART)
    b.step(1, a=0, b=0)
    (part,) = verdicts(b.engine, lambda cause: Missing(f"no {cause.selector}"))
    assert part.outcome.value == "partly judged"
    assert [v.cause for v in part.missing] == ["frozen"]
    assert part.reason == "frozen: no c"
    b.step(2, c=0)
    (part,) = verdicts(b.engine, nothing_missing)
    assert part.outcome.value == "ok"
    assert [(v.cause, v.outcome.value) for v in part.causes] == [("orphan", "ok"), ("left-out", "ok"), ("frozen", "ok")]


def test_a_verdict_counts_what_another_rule_explains(bench: Callable[..., Any]) -> None:
    b = bench(HELD.replace("SEVERITY", "severity: warning"))
    b.step(1, a=1, b=1)
    assert {v.rule: v.outcome.value for v in verdicts(b.engine, nothing_missing)}["curve"] == "warned"


# -- identity and resume -------------------------------------------------------------------------


def test_a_fingerprint_names_the_trouble_and_not_the_step(bench: Callable[..., Any]) -> None:
    first, second, other = bench(PART), bench(PART), bench(PART)
    first.step(1, b=1)
    for step in range(1, 8):
        second.step(step, b=0)
    second.step(9, b=3)
    other.step(1, c=1)
    (one,), (two,), (three,) = alerts(first), alerts(second), alerts(other)
    assert one.fingerprint == two.fingerprint != three.fingerprint


def test_an_episode_goes_on_after_a_resume_with_its_cause_and_its_actions(bench: Callable[..., Any]) -> None:
    b = bench(PART)
    b.step(1, c=1)
    b.step(2, b=1, c=1)
    saved = json.loads(json.dumps(b.engine.state_dict(), allow_nan=False))
    again = Engine(b.rules)
    assert again.load_state_dict(saved) == []
    b.engine = again
    assert again.alerts == []
    found = b.step(3, a=1, b=1, c=1)
    (alert,) = found.amended
    assert (alert.name, alert.fired_step, alert.cause_step) == ("part.orphan", 1, 3)
    assert [f.cause for f in alert.also] == ["left-out", "frozen"]
    assert [p.spec.name for p in found.plan] == ["stop"], "warn and evidence ran before the resume"
    assert alerts(b) == [alert], "it says something new, so it is an alert of this run too"


@pytest.mark.parametrize(
    ("needs", "seen"),
    [
        ("{metrics: [reward, 'kl*']}", [("kl.policy", ())]),
        ("{optimizers: 2}", [("run.optimizers", (("count", "3"),))]),
        ("{ranks: 4}", [("run.ranks", (("count", "4"),))]),
        ("{adapters: true, router: true}", [("run.adapters", ()), ("run.router", ())]),
    ],
)
def test_a_rule_of_an_automatic_pack_applies_once_all_that_it_needs_was_seen(
    bench: Callable[..., Any], needs: str, seen: list[Any]
) -> None:
    from healthcheck.assembly import plugin_host
    from healthcheck.core.samples import Sample
    from healthcheck.rulelang.compile import load_rules
    from healthcheck.rulelang.loader import load_text

    pack = load_text(
        f"version: 1\nexternal: [a]\nrules:\n  r: {{metric: a, when: {{above: 0}}, applies_if: {needs}}}\n"
        f"  late: {{metric: a, when: {{above: 0}}, warmup: 3, applies_if: {needs}}}\n"
    )
    pack.own = False
    engine = Engine(load_rules([pack], registry=plugin_host().registry))
    for step in (1, 2):
        assert engine.evaluate(step, [Sample("a", step, 1.0)], float(step)).alerts == []
    assert {v.outcome.value for v in verdicts(engine, lambda cause: "")} == {"does not apply"}
    if len(seen) > 1:
        engine.evaluate(3, [Sample(seen[0][0], 3, 1.0, seen[0][1])], 3.0)
        assert engine.alerts == []
    saved = json.loads(json.dumps(engine.state_dict(), allow_nan=False))
    engine = Engine(engine_rules := load_rules([pack], registry=plugin_host().registry))
    assert engine.load_state_dict(saved) == []
    assert engine_rules.rules[0].applies_if is not None
    metric, labels = seen[-1]
    engine.evaluate(4, [Sample(metric, 4, 1.0, labels)], 4.0)
    assert [(x.rule, x.fired_step) for x in engine.alerts] == [("r", 1)], "what came before is judged"
    for step in range(5, 9):
        engine.evaluate(step, [Sample("a", step, 1.0)], float(step))
    assert [(x.rule, x.fired_step) for x in engine.alerts] == [("r", 1), ("late", 7)], "its warm-up began at step 4"
    assert not engine.episodes.undecided


@pytest.mark.parametrize(
    ("metric", "labels", "applies"),
    [
        ("loss", (), False),
        ("loss", (("optimizer", "1"),), False),
        ("grad_norm", (("optimizer", "critic"),), False),
        ("loss", (("optimizer", "critic"),), True),
        ("loss.of_actions", (), True),
    ],
)
def test_a_pack_comes_on_by_a_series_and_its_labels(
    metric: str, labels: Any, applies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from healthcheck.assembly import load_rules_for, plugin_host
    from healthcheck.core.samples import Sample

    monkeypatch.chdir(tmp_path)  # no rule file: what is recommended, named by nobody
    engine = Engine(load_rules_for(host=plugin_host()))
    engine.evaluate(1, [Sample(metric, 1, 1.0, labels)], 1.0)
    assert engine.rules["value-divergence"].applies == applies


def test_a_rule_that_a_person_names_always_applies(bench: Callable[..., Any]) -> None:
    b = bench("external: [a]\nrules: {r: {metric: a, when: {above: 0}, applies_if: {optimizers: 2}}}")
    assert b.rules["r"].applies_if is None
    assert [v.outcome.value for v in verdicts(b.engine, lambda cause: Missing("nothing logged a"))] == ["not judged"]
