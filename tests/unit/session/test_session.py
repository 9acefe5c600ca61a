"""From an event to an alert, an action and an exit code."""

from __future__ import annotations

import json
import math

import pytest

import healthcheck
from healthcheck.core.errors import UnknownHookError
from healthcheck.core.events import Event, EventKind
from healthcheck.run.ending import Ending

nan = float("nan")

NAN_STOPS = """
    rules:
      loss-not-finite: {metric: loss, when: nonfinite, severity: error, then: [stop]}
"""


def test_a_nan_loss_is_judged_before_the_update_and_asks_the_trainer_to_stop(watched):
    run = watched(NAN_STOPS)
    run.step(1)
    run.session.emit(Event(EventKind.LOSS, 2, loss=nan))
    assert run.controls.asked == []
    run.session.emit(Event(EventKind.BEFORE_UPDATE, 2))
    assert "stop by loss-not-finite at 2" in run.controls.asked
    report = run.session.finish(Ending(script_exit_code=0))
    assert (report["exit_code"], report["exit_reason"]) == (1, "stopped")
    (alert,) = report["alerts"]
    assert (alert["fired_step"], alert["acted_step"], alert["value"]) == (2, 2, "nan")


def test_the_report_is_strict_json_whatever_the_values(watched):
    run = watched(NAN_STOPS)
    run.step(1, loss=math.inf)
    report = run.session.finish(Ending(script_exit_code=0))
    json.dumps(report, allow_nan=False)


def test_observe_mode_says_what_it_would_have_done_and_keeps_the_scripts_exit_code(watched):
    run = watched(NAN_STOPS, settings={"mode": "observe"})
    run.step(1, loss=nan)
    assert run.controls.asked == []
    report = run.session.finish(Ending(script_exit_code=0))
    assert report["exit_code"] == 0
    (outcome,) = [o for o in report["alerts"][0]["actions"] if o["action"] == "stop"]
    assert outcome["held"]
    assert outcome["text"] == "observe mode"


def test_observe_mode_with_fail_on_given_on_the_command_line_counts_alerts(watched):
    run = watched(NAN_STOPS, settings={"mode": "observe", "fail_on": "error"})
    run.step(1, loss=nan)
    assert run.session.finish(Ending(script_exit_code=0))["exit_code"] == 1


def test_several_ranks_without_a_process_group_only_report_a_stop(watched, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    run = watched(NAN_STOPS)
    run.step(1, loss=nan)
    assert not any(asked.startswith("stop") for asked in run.controls.asked)
    report = run.session.finish(Ending(script_exit_code=0))
    (outcome,) = [o for o in report["alerts"][0]["actions"] if o["action"] == "stop"]
    assert "cannot agree" in outcome["text"]


def test_no_rule_had_data_is_exit_five(watched):
    run = watched("external: [reward]\nrules: {r: {metric: reward, when: {below: 0}}}")
    run.step(1)
    report = run.session.finish(Ending(script_exit_code=0))
    assert (report["exit_code"], report["exit_reason"]) == (5, "not judged")
    assert report["rules"]["r"]["verdict"] == "not judged"


def test_a_required_rule_without_data_fails_the_run(watched):
    run = watched("""
        external: [reward]
        rules:
          r: {metric: reward, when: {below: 0}, required: true}
          l: {metric: loss, when: {above: 100}}
    """)
    run.step(1)
    assert run.session.finish(Ending(script_exit_code=0))["exit_code"] == 1


def test_a_failing_script_keeps_its_own_exit_code_over_alerts(watched):
    run = watched("rules: {l: {metric: loss, when: {above: 0.5}, severity: error}}")
    run.step(1)
    report = run.session.finish(Ending(script_exit_code=3))
    assert (report["exit_code"], report["exit_reason"], report["script_exit_code"]) == (3, "script failed", 3)


def test_custom_metrics_reach_rules_and_log_does_nothing_without_a_session(watched):
    healthcheck.log(kl=1.0)
    run = watched("external: [kl]\nrules: {kl-high: {metric: kl, when: {above: 0.2}}}")
    run.step(1, kl=0.1)
    run.step(2, kl=0.5)
    assert [a.fired_step for a in run.session.alerts] == [2]


def test_functions_and_plugins_mix_and_keep_their_order(watched):
    heard = []

    class Listener:
        @healthcheck.hookimpl
        def healthcheck_step_end(self, event):
            heard.append(("plugin", event.step))

    run = watched(NAN_STOPS)
    run.session.on("step_end", lambda event: heard.append(("function", event.step)))
    run.session.register(Listener(), "listener")
    run.session.on("step_end", lambda session, event: heard.append(("second", event.step)))
    run.step(1)
    assert heard == [("function", 1), ("plugin", 1), ("second", 1)]
    assert run.session.has_hooks("step_end")
    assert run.session.list_hooks("step_end")[1] == "listener"
    assert not run.session.has_hooks("epoch_end")


def test_user_state_is_one_dict_for_the_whole_run(watched):
    run = watched(NAN_STOPS)
    run.session.on("loss", lambda event: event.user_state.__setitem__("n", event.user_state.get("n", 0) + 1))
    run.step(1)
    run.step(2)
    assert run.session.user_state["n"] == 2


def test_an_unknown_event_is_refused_with_a_suggestion(watched):
    run = watched(NAN_STOPS)
    with pytest.raises(UnknownHookError, match='did you mean "step_end"'):
        run.session.on("step_ends", print)


def test_a_plugin_that_raises_each_step_is_quarantined_and_training_goes_on(watched):
    calls = []

    def bad(event):
        calls.append(event.step)
        raise RuntimeError("boom")

    run = watched(NAN_STOPS)
    run.session.on("step_end", bad)
    for step in range(1, 10):
        run.step(step)
    assert calls == [1, 2, 3]
    report = run.session.finish(Ending(script_exit_code=0))
    assert report["exit_code"] == 0
    (error,) = report["plugin_errors"]
    assert (error["count"], error["quarantined"], error["step"]) == (3, True, 1)


def test_a_plugin_that_calls_sys_exit_does_not_end_training(watched):
    def leave(event):
        raise SystemExit(0)

    run = watched(NAN_STOPS)
    run.session.on("step_end", leave)
    run.step(1)
    assert run.session.finish(Ending(script_exit_code=0))["plugin_errors"][0]["error"].startswith("SystemExit")


def test_on_plugin_error_raise_lets_the_error_out(watched):
    run = watched("settings: {on_plugin_error: raise}\n" + "rules: {l: {metric: loss, when: {above: 9}}}")

    def bad(event):
        raise RuntimeError("boom")

    run.session.on("step_end", bad)
    with pytest.raises(RuntimeError, match="boom"):
        run.step(1)


def test_muting_in_code_covers_the_block_only(watched):
    run = watched("rules: {l: {metric: loss, when: {above: 5}, severity: error}}")
    run.step(1)
    with run.session.muted("l", reason="planned restart"):
        run.step(2, loss=9.0)
    run.step(3)
    run.step(4, loss=9.0)
    assert [a.muted for a in run.session.alerts] == ["planned restart", ""]


def test_muting_what_is_no_rule_is_said_at_once(watched):
    run = watched("rules: {high-loss: {metric: loss, when: {above: 5}}}")
    said = []
    run.session.tell = lambda kind, text: said.append(text)
    with run.session.muted("hihg-loss", reason="x"), run.session.muted("high-*", reason="y"):
        run.step(1)
    assert said == ['muted "hihg-loss": there is no such rule here; did you mean "high-loss"?']


def test_nobody_listens_then_nothing_is_wanted(watched):
    run = watched("rules: {}")
    assert not run.session.watching
    assert not any(run.session.wants(kind) for kind in EventKind)


def test_a_probe_that_no_rule_wants_is_not_called(watched):
    run = watched("rules: {lr: {metric: lr, when: {above: 1}}}")
    assert {p.name for probes in run.session.board.by_kind.values() for p in probes} == {"learning-rate"}


def test_an_action_that_raises_is_an_action_error_and_does_not_prevent_the_stop(watched, tmp_path):
    plugin = tmp_path / "bad_action.py"
    plugin.write_text(
        "import healthcheck\n"
        "class Bad:\n"
        "    name = 'bad.page'\n    stage = 'observe'\n    options_schema = {'type': 'object'}\n"
        "    def run(self, alert, context):\n        raise OSError('no network')\n"
        "@healthcheck.hookimpl\n"
        "def healthcheck_register_actions(register):\n    register(Bad())\n"
    )
    run = watched(
        "rules: {l: {metric: loss, when: nonfinite, severity: error, then: [bad.page, stop]}}", plugins=[str(plugin)]
    )
    run.step(1, loss=nan)
    assert any(asked.startswith("stop") for asked in run.controls.asked)
    report = run.session.finish(Ending(script_exit_code=0))
    assert report["action_errors"][0]["error"] == "OSError: no network"


def test_a_plugin_that_fails_on_import_is_one_note_and_an_error_with_strict(watched, tmp_path):
    plugin = tmp_path / "broken.py"
    plugin.write_text("raise ValueError('half written')\n")
    run = watched(NAN_STOPS, plugins=[str(plugin)])
    assert any("half written" in note for note in run.session.info.notes)
    with pytest.raises(healthcheck.PluginError, match="half written"):
        watched(NAN_STOPS, plugins=[str(plugin)], strict_plugins=True)


def test_identical_mitigations_of_two_rules_run_once(watched, tmp_path):
    run = watched("""
        rules:
          a: {metric: loss, when: {above: 1}, then: [skip_update]}
          b: {metric: loss, when: {above: 2}, then: [skip_update]}
    """)
    run.step(1, loss=5.0)
    assert run.controls.asked.count("skip") == 1


def test_what_a_signal_handler_of_the_script_raises_inside_our_code_is_the_scripts(watched):
    """Its sys.exit, or its time limit, may come while a probe or plugin happens to run."""
    import os
    import signal

    def handler(number, frame):
        raise SystemExit(7)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        run = watched(NAN_STOPS)
        run.session.on("step_end", lambda event: os.kill(os.getpid(), signal.SIGUSR1))
        with pytest.raises(SystemExit) as caught:
            run.step(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.value.code == 7
    assert run.session.dispatch.errors == []


def test_what_is_logged_and_is_no_number_is_said_once_and_left_out(watched):
    said = []

    class Reader:
        name = "reader"

        def note(self, text):
            said.append(text)

    run = watched(NAN_STOPS)
    run.session.add_report(Reader())
    for _ in range(3):
        run.session.log({"kl": "abc", "accuracy": 0.5})
    assert said == ['logged "kl" is not a number but str: it is left out']
    assert [sample.metric for sample in run.session.judge.waiting] == ["accuracy"] * 3
