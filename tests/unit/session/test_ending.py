"""How a run ended, on its own: the precedence of exit codes, and why a rule was not judged."""

from __future__ import annotations

import pytest

from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.core.clock import ActiveTime, VirtualClock
from healthcheck.core.events import EventKind
from healthcheck.core.protocols import Capabilities
from healthcheck.core.samples import Sample
from healthcheck.engine.engine import Engine
from healthcheck.engine.summary import verdicts
from healthcheck.run.actor import StopRequest
from healthcheck.run.ending import Ending, JudgedRun, UnjudgedReasons, exit_code, live_report

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
        return self.reasons.why(
            self.engine.by_id[rule].rule, step=step, capabilities=capabilities, seen={EventKind.STEP_END}
        )

    def ended(self, ending: Ending) -> tuple[int, str]:
        return exit_code(self.judged, ending, verdicts(self.engine, lambda rule: "no data"))[:2]


STOPPED = StopRequest("high", 1, "bad", exit_code=9)
OWN = StopRequest("", 1, "asked for 1 step")


@pytest.mark.parametrize(
    ("loss", "stop", "fault", "ending", "expected"),
    [
        (1.0, None, False, Ending(script_exit_code=0), (0, "ok")),
        (9.0, None, False, Ending(script_exit_code=0), (1, "alert")),
        (9.0, STOPPED, False, Ending(), (9, "stop")),
        (9.0, STOPPED, True, Ending(), (3, "monitor_error")),
        (9.0, STOPPED, False, Ending(signal=15), (9, "stop")),
        (1.0, OWN, False, Ending(signal=15), (143, "interrupted")),
        (1.0, None, True, Ending(interrupted=True), (2, "interrupted")),
        (9.0, None, True, Ending(exception=ValueError("x")), (1, "script_error")),
        (9.0, None, True, Ending(script_exit_code=7), (7, "script_error")),
        (9.0, STOPPED, False, Ending(script_exit_code=7), (9, "stop")),
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
        verdicts(run.engine, lambda rule: "no data"),
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
    assert run.why("formula") == "no sample of mine"
    assert run.why("logged") == "nothing logged mine"
    assert run.why("scaler") == "no GradScaler in use"
    assert run.why("late") == "first due at step 100"
    assert run.why("norm") == "no sample of grad_norm was seen"
    assert run.why("norm", blind) == "no sample of grad_norm was seen"  # one of its events is shown
    run.quarantined.add("gradients")
    assert run.why("norm") == "the probe gradients was switched off after errors"


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
