"""``healthcheck.testing``: numbers through rules, and a trainer without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from healthcheck.core.errors import RuleFileError
from healthcheck.core.events import EventKind
from healthcheck.testing import FakeModel, FakeTrainer, open_test_session, play

HIGH = {"version": 1, "rules": {"high": {"metric": "loss", "when": {"above": 5}, "severity": "error"}}}
STOPS = {"version": 1, "rules": {"nan": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["stop"]}}}


def test_played_numbers_fire_at_the_step_that_they_should() -> None:
    played = play(HIGH, {"loss": "1 x3, 9 x2, 1 x2, 9"})
    assert played.fired == {"high": [4, 8]}
    assert (played.steps, played.exit_code, played.verdict("high")) == (8, 1, "failed")


def test_numbers_may_be_a_list_with_gaps() -> None:
    assert play(HIGH, {"loss": [1.0, None, 9.0]}).fired == {"high": [3]}


def test_a_stop_ends_the_playing_and_no_update_is_made_after_it() -> None:
    played = play(STOPS, {"loss": "1 x3, nan, 1 x10"})
    assert played.steps == 4
    assert played.trainer is not None
    assert played.trainer.updates == 3
    assert played.trainer.controls.asked == ["skip_update", "stop by nan at 4"]


def test_a_rule_over_two_metrics_names_the_one_that_never_came() -> None:
    both = {"metric": "loss", "when": {"all": [{"above": 1}, {"metric": "kl", "above": 1}]}}
    played = play({"version": 1, "external": ["kl"], "rules": {"both": both}}, {"loss": "2 x20"})
    assert played.verdict("both") == "not judged"
    assert played.report["rules"]["both"]["reason"] == "no sample of kl came with it"


def test_series_without_data_are_not_judged_and_never_ok() -> None:
    played = play(
        {"version": 1, "external": ["kl"], "rules": {"kl": {"metric": "kl", "when": {"above": 1}}}}, {"loss": "1 x3"}
    )
    assert played.verdict("kl") == "not judged"
    assert played.exit_code == 5


def test_time_passes_by_step_time() -> None:
    assert play(HIGH, {"loss": "1 x5"}, step_time=3.0).report["seconds"] == 15.0


def test_a_series_that_cannot_be_read_says_what_to_write() -> None:
    with pytest.raises(ValueError, match="series loss: "):
        play(HIGH, {"loss": "1 xx3"})


def one(metric: str, **keys: Any) -> dict[str, Any]:
    """A rule file with one rule on one metric."""
    return {"version": 1, "rules": {"one": {"metric": metric, "when": {"above": 5}, "severity": "error", **keys}}}


def test_each_parameter_of_a_family_is_judged_on_its_own() -> None:
    """The nan in the second series, at step 11, is that of one layer and of no other."""
    nan = {"version": 1, "rules": {"nan": {"metric": "grad_norm[*]", "when": "nonfinite"}}}
    series = {"grad_norm[head.weight]": "1.0 x12", "grad_norm[layer.weight]": "1.0 x10, nan, 1.0"}
    played = play(nan, series)
    assert played.fired == {"nan": [11]}
    assert [fact.name for fact in played.alerts[0].series] == ["grad_norm[layer.weight]"]


def test_series_of_optimizers_and_ranks_do_not_mix() -> None:
    played = play(one("loss", **{"for": "2"}), {"loss": "1, 9, 1, 9", "loss[optimizer=1]": "1, 1, 9, 9"})
    assert [(fact.name, a.fired_step) for a in played.alerts for fact in a.series] == [("loss[optimizer=1]", 4)]
    played = play(one("time.step"), {"time.step[rank=0]": "1 x4", "time.step[rank=1]": "1 x3, 9"})
    assert [fact.name for fact in played.alerts[0].series] == ["time.step[rank=1]"]


def test_a_series_with_several_labels_is_one_whatever_their_order() -> None:
    played = play(one("lr[*]"), {"lr[optimizer=1,group=2]": "1, 9"})
    assert [fact.name for fact in played.alerts[0].series] == ["lr[group=2,optimizer=1]"]


def test_labelled_series_reach_a_session_that_goes_on() -> None:
    session = open_test_session(one("grad_norm[*]"))
    FakeTrainer(session).train_step(1.0)
    played = play(session, {"grad_norm[w]": "1, 9", "grad_norm[b]": [1.0, None]})
    assert played.fired == {"one": [3]}
    assert (played.steps, played.report, session.step) == (2, {}, 3)


def test_a_step_of_the_fake_trainer_takes_labelled_metrics() -> None:
    session = open_test_session(one("grad_norm[*]"))
    trainer = FakeTrainer(session)
    trainer.train_step(1.0, log={"grad_norm[w]": 9.0})
    assert [fact.name for fact in session.alerts[0].series] == ["grad_norm[w]"]


@pytest.mark.parametrize("name", ["grad_norm[w", "grad_norm[*]", "grad_norm[]", "[w]"])
def test_a_name_that_is_no_single_series_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="labels are written as in"):
        play(HIGH, {name: "1"})


def test_a_pause_is_refused_because_no_time_would_pass() -> None:
    with pytest.raises(ValueError, match="step_time"):
        play(HIGH, {"loss": "1, gap 400s, 1"})


def test_mistakes_in_rules_are_those_of_the_rule_language() -> None:
    with pytest.raises(RuleFileError, match='did you mean "loss"'):
        play({"version": 1, "rules": {"a": {"metric": "los", "when": {"above": 5}}}}, {"loss": "1"})


def test_the_fake_trainer_emits_every_event_of_a_run_in_order() -> None:
    session = open_test_session()
    heard: list[str] = []
    for kind in EventKind:
        session.on(kind, lambda event: heard.append(event.kind.value))
    trainer = FakeTrainer(session)
    trainer.train_step(1.0, micro_batches=2)
    trainer.evaluate(loss=2.0)
    trainer.evaluate(test=True, loss=2.0)
    trainer.save("somewhere")
    trainer.end_epoch()
    trainer.finish(exception=ValueError("oh"))
    assert set(heard) == {kind.value for kind in EventKind}
    step = [
        "step_start",
        "batch_ready",
        "loss",
        "batch_ready",
        "loss",
        "backward_end",
        "before_update",
        "after_update",
        "step_end",
    ]
    assert heard[:11] == ["train_start", "epoch_start", *step]
    assert heard[-1] == "train_end"


def test_evaluation_results_are_judged_under_their_names() -> None:
    rules = {"version": 1, "rules": {"e": {"metric": "eval.loss", "when": {"above": 5}, "phase": "eval"}}}
    session = open_test_session(rules)
    trainer = FakeTrainer(session)
    trainer.train_step(1.0)
    trainer.evaluate(loss=9.0)
    trainer.train_step(1.0)
    assert [a["rule"] for a in trainer.finish()["alerts"]] == ["e"]


def test_controls_do_what_they_say(tmp_path: Path) -> None:
    trainer = FakeTrainer(open_test_session(), model=FakeModel())
    assert trainer.controls.scale_lr(0.5) == [5e-4]
    assert not trainer.controls.skip_update()  # not before an update
    assert Path(trainer.controls.request_checkpoint(tmp_path / "a" / "c.pt")).is_file()


def test_a_control_that_is_missing_is_named_by_the_action() -> None:
    session = open_test_session(STOPS)
    trainer = FakeTrainer(session, unable={"stop": "this trainer cannot stop"})
    trainer.run(3, loss=float("nan"))
    assert any("this trainer cannot stop" in outcome.text for alert in session.alerts for outcome in alert.actions)


def test_testing_needs_no_torch() -> None:
    """Rules are tested on laptops and in lint jobs."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from healthcheck.testing import play\n"
        f"assert play({HIGH!r}, {{'loss': '1, 9'}}).fired == {{'high': [2]}}"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
