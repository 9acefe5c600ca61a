"""How a run ended, on its own: the precedence of exit codes, and why a rule was not judged."""

from __future__ import annotations

from typing import Any

import pytest

from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.core.alerts import Missing, Outcome
from healthcheck.core.clock import ActiveTime, VirtualClock
from healthcheck.core.events import EventKind
from healthcheck.core.protocols import Capabilities
from healthcheck.core.samples import Sample
from healthcheck.engine.engine import Engine
from healthcheck.engine.summary import verdicts
from healthcheck.run.actor import StopRequest
from healthcheck.run.ending import Ending, JudgedRun, live_end, live_report
from healthcheck.run.unjudged import UnjudgedReasons

RULES = {
    "high": {"metric": "loss", "when": {"above": 5}, "severity": "error"},
    "norm": {"metric": "grad_norm", "when": {"above": 5}},
    "late": {"metric": "lr", "when": {"above": 5}, "every": 100},
    "formula": {"metric": "ratio", "when": {"above": 5}},
    "logged": {"metric": "mine", "when": {"above": 5}},
    "scaler": {"metric": "amp.scale", "when": {"above": 5}},
}


class Run:
    """A judged run without a session: an engine that has seen some samples."""

    def __init__(self, **samples: float) -> None:
        self.host = plugin_host()
        document = {"version": 1, "external": ["mine"], "metrics": {"ratio": "loss / mine"}, "rules": RULES}
        self.rules = load_rules_for(host=self.host, rules=document)
        self.engine = Engine(self.rules)
        result = self.engine.evaluate(1, [Sample(name, 1, value) for name, value in samples.items()], 1.0)
        self.quarantined: set[str] = set()
        self.reasons = UnjudgedReasons(
            self.engine,
            derived=self.rules.derived,
            registry=self.host.registry,
            quarantined=self.quarantined.__contains__,
        )
        self.judged = JudgedRun(self.engine, self.rules, result.alerts, target="t", steps=1, seconds=1.0)

    def why(self, rule: str, capabilities: Capabilities | None = None, step: int = 1) -> str:
        return self.missing(rule, capabilities, step).reason

    def missing(self, rule: str, capabilities: Capabilities | None = None, step: int = 1) -> Missing:
        return self.reasons.why(
            self.engine.by_id[rule].cause, step=step, capabilities=capabilities, seen={EventKind.STEP_END}
        )

    def ended(self, ending: Ending) -> tuple[int, str]:
        return live_end(self.judged, ending, verdicts(self.engine, lambda rule: Missing("no data")))[:2]


STOPPED = StopRequest("high", 1, "bad", exit_code=9)
OWN = StopRequest("", 1, "asked for 1 step")


@pytest.mark.parametrize(
    ("loss", "stop", "fault", "ending", "expected"),
    [
        (1.0, None, False, Ending(script_exit_code=0), (0, "ok")),
        (9.0, None, False, Ending(script_exit_code=0), (1, "failed")),
        (9.0, STOPPED, False, Ending(), (9, "stopped")),
        (9.0, STOPPED, True, Ending(), (3, "internal error")),
        (9.0, STOPPED, False, Ending(signal=15), (9, "stopped")),
        (1.0, OWN, False, Ending(signal=15), (143, "interrupted")),
        (1.0, None, True, Ending(interrupted=True), (2, "interrupted")),
        (9.0, None, True, Ending(exception=ValueError("x")), (1, "script failed")),
        (9.0, None, True, Ending(script_exit_code=7), (7, "script failed")),
        (9.0, STOPPED, False, Ending(script_exit_code=7), (9, "stopped")),
        (1.0, OWN, False, Ending(), (0, "ok")),
    ],
)
def test_the_exit_code_says_the_gravest_thing_in_the_documented_order(
    loss: float, stop: StopRequest | None, fault: bool, ending: Ending, expected: tuple[int, str]
) -> None:
    run = Run(loss=loss)
    run.judged.stop = stop
    run.judged.internal_errors = [{"error": "ours"}] if fault else []
    assert run.ended(ending) == expected


def test_the_report_of_a_live_run_adds_its_trainer_its_script_and_what_watching_cost() -> None:
    run = Run(loss=1.0)
    capabilities = Capabilities("loop", frozenset({EventKind.LOSS}), frozenset({"stop"}), {"log": "no logger"})
    report = live_report(
        run.judged,
        verdicts(run.engine, lambda rule: Missing("no data")),
        Ending(exception=ValueError("x")),
        capabilities=capabilities,
        accepted_unused=["gone"],
        overhead={"host_seconds": 0.1},
    )
    assert report["trainer"] == "loop"
    assert report["capabilities"] == {"events": ["loss"], "controls": ["stop"], "gaps": {"log": "no logger"}}
    assert report["exception"] == "ValueError: x"
    assert (report["accepted_unused"], report["overhead"]) == (["gone"], {"host_seconds": 0.1})
    assert "script_exit_code" not in report


def test_a_rule_that_had_no_sample_says_what_would_have_had_to_be_there() -> None:
    run = Run(loss=1.0)
    blind = Capabilities(
        "mine", frozenset({EventKind.LOSS, EventKind.STEP_END}), frozenset(), {"backward_end": "no backward is shown"}
    )
    telling = Capabilities("mine", frozenset(EventKind), frozenset(), {"grad_norm": "norms are fused away"})
    assert run.why("high", step=0) == "no training step was seen"
    assert run.why("norm", telling) == "norms are fused away"
    assert run.why("formula") == "nothing logged mine"
    assert run.why("logged") == "nothing logged mine"
    assert run.why("scaler") == "no GradScaler in use"
    assert run.why("late") == "first due at step 100"
    assert run.why("norm") == "no sample of grad_norm was seen"
    assert run.why("norm", blind) == "no sample of grad_norm was seen"  # one of its events is shown
    run.quarantined.add("gradients")
    assert run.why("norm") == "the probe gradients was switched off after errors"


@pytest.mark.parametrize("rule", ["scaler", "logged", "norm"])
def test_a_rule_that_the_user_wrote_always_applies(rule: str) -> None:
    assert Run(loss=1.0).missing(rule).applies


def test_a_rule_of_a_pack_applies_where_the_run_has_what_it_judges() -> None:
    host = plugin_host()
    rules = load_rules_for(host=host, rules="healthcheck:recommended")
    engine = Engine(rules)
    result = engine.evaluate(1, [Sample("loss", 1, 1.0)], 1.0)
    reasons = UnjudgedReasons(engine, derived=rules.derived, registry=host.registry, quarantined=lambda name: False)
    judged = verdicts(engine, lambda rule: reasons.why(rule, step=100, capabilities=None, seen=()), steps=100)
    entries = {v.rule: v for v in judged}
    assert result.alerts == []
    assert entries["updates-skipped"].outcome is Outcome.DOES_NOT_APPLY
    assert entries["updates-skipped"].reason == "no GradScaler in use"
    assert entries["overfit"].outcome is Outcome.NOT_JUDGED
    assert entries["overfit"].remedy == "log eval.loss to judge over-fitting"
    causes = {cause.cause: cause for cause in entries["part-does-not-train"].causes}
    assert causes["optimizer-never-steps"].needs_steps == 150
    assert entries["grads-not-finite"].outcome is Outcome.NOT_JUDGED  # every training has gradients: that is no excuse


@pytest.mark.parametrize(
    ("loss", "severity", "settings", "change", "expected"),
    [
        (1.0, "warning", {}, {}, (0, "ok")),
        (9.0, "info", {}, {}, (0, "ok")),
        (9.0, "warning", {}, {}, (0, "warned")),
        (9.0, "warning", {}, {"muted": "known"}, (0, "ok")),
        (9.0, "warning", {}, {"accepted": "known"}, (0, "ok")),
        (9.0, "warning", {}, {"cleared_step": 2}, (0, "warned")),
        (9.0, "warning", {}, {"explained_by": "other"}, (0, "warned")),
        (9.0, "error", {"mode": "observe"}, {}, (0, "warned")),
        (9.0, "error", {"fail_on": "never"}, {}, (0, "warned")),
        (9.0, "error", {"fail_on": "never"}, {"accepted": "known"}, (0, "ok")),
        (9.0, "warning", {"fail_on": "warning"}, {}, (1, "failed")),
        (9.0, "error", {}, {"explained_by": "other"}, (1, "failed")),
    ],
)
def test_no_run_is_ok_beside_an_alert_that_counts(
    loss: float, severity: str, settings: dict[str, Any], change: dict[str, Any], expected: tuple[int, str]
) -> None:
    document = {"version": 1, "rules": {"high": {"metric": "loss", "when": {"above": 5}, "severity": severity}}}
    rules = load_rules_for(host=plugin_host(), rules=document, settings=settings)
    engine = Engine(rules)
    alerts = engine.evaluate(1, [Sample("loss", 1, loss)], 1.0).alerts
    for alert in alerts:
        for name, value in change.items():
            setattr(alert, name, value)
    run = JudgedRun(engine, rules, alerts, target="t", steps=1, seconds=1.0)
    end = live_end(run, Ending(), verdicts(engine, lambda rule: Missing("no data")))
    assert (end.code, end.verdict) == expected


def test_the_time_of_training_stands_still_in_evaluations_and_nested_ones_count_once() -> None:
    clock = VirtualClock(100.0)
    active = ActiveTime(clock)
    clock.advance(5.0)
    active.pause(clock.monotonic())
    clock.advance(10.0)
    active.pause(clock.monotonic())
    assert active() == 5.0
    active.resume(clock.monotonic())
    clock.advance(1.0)
    assert active() == 5.0
    active.resume(clock.monotonic())
    clock.advance(2.0)
    assert active() == 7.0
    active.resume(clock.monotonic())  # some trainers announce only the end
    assert active() == 7.0
    assert active.at(110.0) == pytest.approx(110.0 - active.origin)
