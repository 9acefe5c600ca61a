"""The actor on its own: in which order actions run, what keeps one from running, and what a failure costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.core.alerts import ActionOutcome, Alert
from healthcheck.core.errors import StopTraining
from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import ActionContext
from healthcheck.core.runinfo import RunInfo
from healthcheck.core.samples import Sample
from healthcheck.engine.columns import History
from healthcheck.engine.engine import Engine
from healthcheck.extend.host import PluginHost
from healthcheck.run.actor import Actor, SessionControls, StopState

PLUGIN = '''
import healthcheck

class Noted:
    """Notes that it ran."""
    options_schema = {"type": "object"}
    def __init__(self, name, stage):
        self.name, self.stage = name, stage
    def run(self, alert, context):
        return healthcheck.ActionOutcome.of(self.name, f"{self.name} for {alert.rule}")

class Broken(Noted):
    """Raises."""
    def run(self, alert, context):
        raise OSError("no network")

@healthcheck.hookimpl
def healthcheck_register_actions(register):
    register(Noted("my.look", "observe"))
    register(Noted("my.mend", "mitigate"))
    register(Noted("my.end", "stop"))
    register(Broken("my.page", "observe"))
'''


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> PluginHost:
    plugin = tmp_path_factory.mktemp("plugin") / "my.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    return plugin_host([str(plugin)])


class Acting:
    """An actor over the plans that real rules make."""

    def __init__(self, host: PluginHost, rules: dict[str, Any], *, observe: bool = False, ranks: int = 1) -> None:
        self.info = RunInfo("t", world_size=ranks)
        self.done: dict[str, int] = {}
        self.actor = Actor(
            host.registry.actions,
            observe=observe,
            info=self.info,
            history=History(),
            done=self.done,
            say=lambda text: None,
        )
        document = {"version": 1, "external": ["a", "grad.a"], "rules": rules}
        self.engine = Engine(load_rules_for(host=host, rules=document))
        self.controls = SessionControls(
            Trainer(),
            stop=StopState(),
            info=self.info,
            note=lambda text: None,  # type: ignore[arg-type]
            mute=self.engine.mutes.append,
        )
        self.step = 0

    def run(self, **values: float) -> list[Alert]:
        self.step += 1
        samples = [Sample(name.replace("__", "."), self.step, value) for name, value in values.items()]
        result = self.engine.evaluate(self.step, samples, float(self.step))
        self.actor.run(result.plan, self.controls, self.step, Event(EventKind.STEP_END, self.step))
        return result.alerts


class Trainer:
    """Controls that can do nothing: the actions of these tests ask for nothing."""


def said(alerts: Sequence[Alert]) -> list[str]:
    return [outcome.text for alert in alerts for outcome in alert.actions]


def rule(*actions: str, metric: str = "a", **keys: Any) -> dict[str, Any]:
    return {"metric": metric, "when": {"above": 1}, "then": list(actions), **keys}


def test_what_observes_runs_before_what_mends_and_a_stop_comes_last(host: PluginHost) -> None:
    ran: list[str] = []
    acting = Acting(host, {"r": rule("my.end", "my.mend", "my.look")})
    for action in acting.actor.actions.values():
        _listen(action, ran)
    acting.run(a=5.0)
    assert ran == ["my.look", "my.mend", "my.end"]
    assert acting.done == {"my.look": 1, "my.mend": 1, "my.end": 1}


def _listen(action: Any, ran: list[str]) -> None:
    run: Callable[[Alert, ActionContext], ActionOutcome] = type(action).run

    def listening(alert: Alert, context: ActionContext) -> ActionOutcome:
        ran.append(action.name)
        return run(action, alert, context)

    if action.name.startswith("my."):
        action.run = listening


def test_a_mitigation_that_two_rules_ask_for_is_done_once(host: PluginHost) -> None:
    acting = Acting(host, {"one": rule("my.mend"), "two": rule("my.mend")})
    assert said(acting.run(a=5.0)) == ["my.mend for one", "done for one"]
    assert acting.done == {"my.mend": 1}


def test_in_observe_mode_only_what_observes_runs_and_the_rest_says_why_not(host: PluginHost) -> None:
    acting = Acting(host, {"r": rule("my.look", "my.mend", "my.end")}, observe=True)
    (alert,) = acting.run(a=5.0)
    assert [(o.action, o.done, o.held, o.text) for o in alert.actions] == [
        ("my.look", True, False, "my.look for r"),
        ("my.mend", False, True, "observe mode"),
        ("my.end", False, True, "observe mode"),
    ]
    assert alert.acted_step is None


def test_an_action_that_raises_is_an_error_of_that_action_and_the_others_run(host: PluginHost) -> None:
    acting = Acting(host, {"r": rule("my.page", "my.mend")})
    assert said(acting.run(a=5.0)) == ["failed: OSError: no network", "my.mend for r"]
    assert acting.actor.errors == [{"action": "my.page", "rule": "r", "step": 1, "error": "OSError: no network"}]
    assert acting.done == {"my.mend": 1}


def test_a_deliberate_stop_passes_through(host: PluginHost) -> None:
    acting = Acting(host, {"r": rule("my.look")})

    def stops(alert: Alert, context: ActionContext) -> ActionOutcome:
        raise StopTraining("now")

    acting.actor.actions["my.look"].run = stops  # type: ignore[method-assign]
    with pytest.raises(StopTraining):
        acting.run(a=5.0)
    del acting.actor.actions["my.look"].run


def test_ranks_that_cannot_agree_do_not_stop_and_say_why(host: PluginHost) -> None:
    acting = Acting(host, {"r": rule("stop", "warn")}, ranks=4)
    (alert,) = acting.run(a=5.0)
    (outcome,) = [o for o in alert.actions if o.action == "stop"]
    assert (outcome.held, outcome.text) == (True, "4 ranks cannot agree: no process group was seen")


def test_the_number_of_ranks_may_become_known_when_training_begins(host: PluginHost) -> None:
    acting = Acting(host, {"r": rule("scale_lr", metric="a", **{"for": "1 of 1"})})
    acting.info.world_size = 2
    (alert,) = acting.run(a=5.0)
    assert "2 ranks: only a rule on gradients" in alert.actions[0].text


def test_a_cleanup_in_an_emergency_is_an_ordinary_action_without_a_rule(host: PluginHost) -> None:
    acting = Acting(host, {"r": rule("warn")})
    assert acting.actor.emergency("my.mend", acting.controls, 7) == "my.mend for "
    assert acting.actor.emergency("no.such", acting.controls, 7) is None
    observing = Acting(host, {"r": rule("warn")}, observe=True)
    assert observing.actor.emergency("my.mend", observing.controls, 7) is None


def test_an_action_is_given_the_folder_of_the_record(host: PluginHost, tmp_path: Path) -> None:
    acting = Acting(host, {"r": rule("my.look")})
    acting.info.run_dir = tmp_path
    seen: list[Path | None] = []

    def look(alert: Alert, context: ActionContext) -> ActionOutcome:
        seen.append(context.run_dir)
        return ActionOutcome.nothing_done("my.look", "looked")

    acting.actor.actions["my.look"].run = look  # type: ignore[method-assign]
    acting.run(a=5.0)
    del acting.actor.actions["my.look"].run
    assert seen == [tmp_path]
    assert acting.done == {}
