"""Random rules with causes over random streams: what holds whatever comes."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from healthcheck.assembly import plugin_host
from healthcheck.core.alerts import Alert, Kind, Severity
from healthcheck.core.samples import Sample
from healthcheck.engine.engine import Engine
from healthcheck.engine.episodes import Evaluation
from healthcheck.engine.summary import verdicts
from healthcheck.rulelang.compile import load_rules
from healthcheck.rulelang.rule import RuleSet

METRICS = ["m0", "m1", "m2", "m3"]
STEPS = 40
KINDS = ["fact", "measure", "trend"]
TAGS = ["loss", "weights", "mine"]
ACTIONS = [["warn"], ["warn", "evidence"], ["stop"], ["skip_update"], ["warn", "stop"], [{"stop": {"after": 2}}], []]


@st.composite
def body(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "kind": kind,
        "metric": draw(st.sampled_from([*METRICS, "family[*]"])),
        "when": {"above": draw(st.sampled_from([0.2, 0.5, 0.8]))},
        "severity": draw(st.sampled_from(["info", "warning", "error"])),
        "then": draw(st.sampled_from(ACTIONS)),
        "tags": draw(st.lists(st.sampled_from(TAGS), unique=True, max_size=2)),
    }
    if draw(st.booleans()):
        made["for"] = draw(st.sampled_from([2, "2 of 3"]))
    if draw(st.integers(0, 3)) == 0:
        made["holds_back"] = draw(st.lists(st.sampled_from(["trend", "measure", "mine"]), min_size=1, unique=True))
    return made


@st.composite
def rule_file(draw: st.DrawFn) -> dict[str, Any]:
    rules: dict[str, Any] = {}
    for i in range(draw(st.integers(1, 4))):
        kinds = sorted(draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)), key=KINDS.index)
        rule: dict[str, Any] = (
            draw(body(kinds[0]))
            if len(kinds) == 1
            else {"causes": {f"c{n}": draw(body(kind)) for n, kind in enumerate(kinds)}}
        )
        if draw(st.booleans()):
            rule["cooldown"] = draw(st.integers(0, 8))
        if i and draw(st.booleans()):
            rule["explains"] = [f"r{draw(st.integers(0, i - 1))}"]
        rules[f"r{i}"] = rule
    file: dict[str, Any] = {"version": 1, "external": [*METRICS, "family"], "rules": rules}
    if draw(st.integers(0, 3)) == 0:
        file["mute"] = [{"rule": "r0", "steps": "5..20", "reason": "known"}]
    return file


def stream(seed: int) -> list[list[Sample]]:
    """Levels that stay for a while, so that causes overlap, with gaps and values that are no numbers."""
    random = Random(seed)
    level = dict.fromkeys([*METRICS, "l0", "l1"], 0.0)
    made = []
    for step in range(1, STEPS + 1):
        samples = []
        for name in level:
            if random.random() < 0.25:
                level[name] = random.choice([0.0, 0.0, 0.3, 0.6, 0.9, math.nan])
            if random.random() < 0.1:
                continue
            metric, labels = ("family", (("parameter", name),)) if name.startswith("l") else (name, ())
            samples.append(Sample(metric, step, level[name], labels))
        made.append(samples)
    return made


def compiled(text: dict[str, Any]) -> RuleSet:
    return load_rules([text], registry=plugin_host().registry)


def played(
    rules: RuleSet, samples: list[list[Sample]], cuts: set[int] | None = None
) -> tuple[Engine, list[Evaluation]]:
    engine, results = Engine(rules), []
    for step, batch in enumerate(samples, 1):
        results.append(engine.evaluate(step, batch, float(step)))
        if cuts and step in cuts:
            saved = json.loads(json.dumps(engine.state_dict(), allow_nan=False))
            engine = Engine(rules)
            assert engine.load_state_dict(saved, now=float(step)) == []
    return engine, results


common = settings(
    deadline=None,
    derandomize=True,
    max_examples=60,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
seeds = st.integers(0, 10**6)


@common
@given(text=rule_file(), seed=seeds)
def test_a_rule_has_one_alert_per_episode(text: dict[str, Any], seed: int) -> None:
    rules = compiled(text)
    engine = Engine(rules)
    open_now: dict[str, Alert] = {}
    for step, batch in enumerate(stream(seed), 1):
        result = engine.evaluate(step, batch, float(step))
        for alert in result.alerts:
            if alert.repeat:
                assert alert.number == open_now[alert.rule].number
                continue
            assert alert.rule not in open_now
            open_now[alert.rule] = alert
        for alert in result.amended:
            assert open_now[alert.rule] is alert
        for alert in result.cleared:
            assert open_now.pop(alert.rule) is alert
        assert set(open_now) == {name for name, state in engine.rules.items() if state.firing}
        for name, alert in open_now.items():
            firing = [s.cause.name for s in engine.rules[name].causes if s.firing]
            assert set(firing) <= {f.cause for f in alert.findings}, "all that fires is in the alert"


@common
@given(text=rule_file(), seed=seeds)
def test_the_most_certain_cause_speaks_at_the_highest_severity(text: dict[str, Any], seed: int) -> None:
    rules = compiled(text)
    engine, _ = played(rules, stream(seed))
    for alert in engine.alerts:
        shown = [f for f in alert.findings if not f.muted] or alert.findings
        order = [cause.name for cause in rules[alert.rule].causes]
        assert alert.cause == min((f.cause for f in shown), key=order.index)
        assert alert.severity == max(f.severity for f in shown)
        assert alert.fired_step == min(f.fired_step for f in alert.findings) or alert.muted == ""
        steps = [change.step for change in alert.changes]
        assert steps == sorted(steps)
    for verdict in verdicts(engine, lambda cause: ""):
        worst = max((a.severity for a in engine.alerts if a.rule == verdict.rule and a.counts), default=Severity.INFO)
        assert (verdict.outcome.value == "failed") == (worst is Severity.ERROR)


@common
@given(text=rule_file(), seed=seeds)
def test_no_action_that_changes_the_run_is_swallowed(text: dict[str, Any], seed: int) -> None:
    """Each cause that fires unmuted has its stop (or the like) run in the episode, unless ``after`` or ``cooldown`` wait."""
    rules = compiled(text)
    engine, results = played(rules, stream(seed))
    ran: set[tuple[int, str]] = set()
    for result in results:
        for planned in result.plan:
            if not planned.held:
                ran.add((planned.alert.number, planned.spec.key))
            elif planned.spec.stage != "observe":
                assert planned.held.startswith(("muted", "within the cooldown")), planned.held
    for alert in engine.alerts:
        for finding in alert.findings:
            cause = next(c for c in rules[alert.rule].causes if c.name == finding.cause)
            for spec in cause.actions:
                if spec.stage != "observe" and spec.after == 1 and cause.cooldown is None and not finding.muted:
                    assert (alert.number, spec.key) in ran


@common
@given(text=rule_file(), seed=seeds)
def test_an_action_runs_once_an_episode(text: dict[str, Any], seed: int) -> None:
    rules = compiled(text)
    _, results = played(rules, stream(seed))
    ran: set[tuple[int, str]] = set()
    for result in results:
        for planned in result.plan:
            if not planned.held and rules[planned.alert.rule].cooldown is None:
                key = (planned.alert.number, planned.spec.key)
                assert key not in ran
                ran.add(key)


@common
@given(text=rule_file(), seed=seeds)
def test_holding_back_hides_nothing_that_is_more_severe_or_came_first(text: dict[str, Any], seed: int) -> None:
    rules = compiled(text)
    engine = Engine(rules)
    for step, batch in enumerate(stream(seed), 1):
        for alert in engine.evaluate(step, batch, float(step)).alerts:
            if not alert.explained_by:
                continue
            holder = engine.rules[alert.explained_by]
            other = holder.open or holder.episodes[-1]
            assert other.severity >= alert.severity
            assert not other.muted
            assert other.fired_step <= alert.fired_step
            seen = {alert.rule}
            while other.explained_by:  # one that is shown stands at the end
                assert other.rule not in seen
                seen.add(other.rule)
                holder = engine.rules[other.explained_by]
                other = holder.open or holder.episodes[-1]
            by_word = alert.rule in rules[alert.explained_by].explains
            certain = max(c.kind for c in rules[alert.explained_by].causes)
            assert by_word or certain > alert.kind
            assert by_word or alert.kind is not Kind.FACT


@common
@given(text=rule_file(), seed=seeds)
def test_verdicts_do_not_depend_on_what_holds_back(text: dict[str, Any], seed: int) -> None:
    def bare(entry: dict[str, Any]) -> dict[str, Any]:
        kept = {key: value for key, value in entry.items() if key not in ("explains", "holds_back", "tags")}
        if "causes" in kept:
            kept["causes"] = {name: bare(cause) for name, cause in kept["causes"].items()}
        return kept

    without = {**text, "rules": {name: bare(rule) for name, rule in text["rules"].items()}}
    ends = []
    for file in (text, without):
        engine, results = played(compiled(file), stream(seed))
        acts = [
            (p.alert.number, p.cause.id, p.spec.key)
            for result in results
            for p in result.plan
            if not p.held and p.spec.stage != "observe" and p.spec.after == 1 and p.cause.cooldown is None
        ]
        ends.append(([(v.rule, v.outcome, v.episodes) for v in verdicts(engine, lambda cause: "")], acts))
    assert ends[0] == ends[1]


@common
@given(text=rule_file(), seed=seeds, shuffle=st.integers(0, 10**6))
def test_the_order_of_rules_and_of_samples_decides_nothing_but_order(
    text: dict[str, Any], seed: int, shuffle: int
) -> None:
    names = list(text["rules"])
    Random(shuffle).shuffle(names)
    other = {**text, "rules": {name: text["rules"][name] for name in names}}
    mixed = []
    for batch in stream(seed):
        again = list(batch)
        Random(shuffle).shuffle(again)
        mixed.append(again)

    def facts(engine: Engine) -> set[Any]:
        return {
            (
                alert.rule,
                alert.cause,
                alert.severity,
                alert.fired_step,
                alert.cleared_step,
                alert.count,
                alert.muted,
                bool(alert.explained_by)
                if len(names) < 3 and not any("explains" in r for r in text["rules"].values())
                else 0,
                frozenset((f.cause, f.fired_step, f.cleared_step, f.severity, f.count) for f in alert.findings),
            )
            for alert in engine.alerts
        }

    assert facts(played(compiled(text), stream(seed))[0]) == facts(played(compiled(other), mixed)[0])


@common
@given(text=rule_file(), seed=seeds, cuts=st.sets(st.integers(1, STEPS - 1), min_size=1, max_size=4))
def test_saved_and_restored_in_mid_episode_all_goes_on_as_without(
    text: dict[str, Any], seed: int, cuts: set[int]
) -> None:
    def said(results: list[Evaluation]) -> list[Any]:
        def of(alert: Alert) -> Any:
            findings = [
                (f.cause, f.fired_step, f.cleared_step, str(f.severity), f.count, f.muted, repr(f.value), f.message)
                for f in alert.findings
            ]
            changes = [(c.step, c.before, c.after) for c in alert.changes]
            return (
                alert.rule,
                alert.cause,
                str(alert.severity),
                alert.fired_step,
                alert.cleared_step,
                alert.episode,
                alert.explained_by,
                alert.muted,
                findings,
                changes,
            )

        return [
            (
                [of(a) for a in r.alerts],
                [of(a) for a in r.amended],
                [of(a) for a in r.cleared],
                r.recovered,
                [(p.cause.id, p.spec.key, p.held) for p in r.plan],
            )
            for r in results
        ]

    rules = compiled(text)
    samples = stream(seed)
    whole, cut = played(rules, samples)[1], played(rules, samples, cuts)[1]
    # What an alert says in the end is written into it later: the same objects are compared at the same ends.
    assert [entry[3:] for entry in said(whole)] == [entry[3:] for entry in said(cut)]
    assert [len(r.alerts) for r in whole] == [len(r.alerts) for r in cut]
    assert [[a.rule for a in r.amended] for r in whole] == [[a.rule for a in r.amended] for r in cut]
    assert [entry[2] for entry in said(whole)] == [entry[2] for entry in said(cut)]
