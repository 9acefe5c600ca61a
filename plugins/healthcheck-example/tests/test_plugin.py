"""The plugin fits the specification, and each part does its work in a real session."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from healthcheck import EMPTY
from healthcheck.testing import FakeModel, FakeTrainer, check_plugin, open_test_session, play

import healthcheck_example
from healthcheck_example.condition import GROWN
from healthcheck_example.reader import LogReader

PLUGIN = "healthcheck_example"
INSTALLED = any(point.name == PLUGIN for point in entry_points(group="healthcheck"))
LOCAL = [] if INSTALLED else [PLUGIN]
"""Where the entry point is not there, the package is loaded as a local plugin, as `-p` does."""


def rule(**keys: Any) -> dict[str, Any]:
    """A rule file with one rule, called `mine`."""
    return {"version": 1, "rules": {"mine": keys}}


def test_the_plugin_fits_the_specification() -> None:
    assert check_plugin(healthcheck_example, PLUGIN) == []


# --- the probe


def test_the_norm_is_that_of_all_parameters() -> None:
    module = torch.nn.Linear(3, 2)
    session = open_test_session(rule(metric="healthcheck_example.weight_norm", when={"above": 1e9}), plugins=LOCAL)
    trainer = FakeTrainer(session, model=FakeModel(dict(module.named_parameters())))
    trainer.run(3)
    trainer.finish()
    expected = torch.cat([p.detach().flatten() for p in module.parameters()]).norm()
    values = [value for _, value in session.history("healthcheck_example.weight_norm")]
    assert values == pytest.approx([float(expected)] * 3)


def test_the_probe_works_only_at_the_steps_that_a_rule_looks_at() -> None:
    rules = rule(metric="healthcheck_example.weight_norm", when={"above": 1e9}, every=3)
    session = open_test_session(rules, plugins=LOCAL)
    trainer = FakeTrainer(session, model=FakeModel({"weight": torch.ones(4)}))
    trainer.run(7)
    trainer.finish()
    assert [step for step, _ in session.history("healthcheck_example.weight_norm")] == [3, 6]


def test_no_parameters_give_no_sample_instead_of_zero() -> None:
    session = open_test_session(rule(metric="healthcheck_example.weight_norm", when={"below": 1}), plugins=LOCAL)
    trainer = FakeTrainer(session, model=FakeModel())
    trainer.run(3)
    assert trainer.finish()["rules"]["mine"]["verdict"] == "not judged"


# --- the condition


def test_growth_is_measured_against_the_first_value() -> None:
    rules = rule(metric="loss", when={"healthcheck_example.grown": 3})
    played = play(rules, {"loss": "2, 3, 5.9, 6"}, plugins=LOCAL)
    assert played.fired == {"mine": [4]}
    assert [(alert.score, alert.normal) for alert in played.alerts] == [(3.0, 2.0)]


def test_the_first_value_above_zero_counts() -> None:
    rules = rule(metric="loss", when={"healthcheck_example.grown": 3})
    assert play(rules, {"loss": "0, 5, 14"}, plugins=LOCAL).fired == {}
    assert play(rules, {"loss": "0, 5, 15"}, plugins=LOCAL).fired == {"mine": [3]}


def test_the_report_says_how_near_a_silent_run_came() -> None:
    rules = rule(metric="loss", when={"healthcheck_example.grown": 3})
    report = play(rules, {"loss": "2, 3, 5, 4"}, plugins=LOCAL).report
    assert report["rules"]["mine"]["closest"] == {"score": 2.5, "step": 3}


def test_a_bad_update_can_be_held_back() -> None:
    rules = rule(metric="loss", when={"healthcheck_example.grown": 3}, then=["skip_update"])
    played = play(rules, {"loss": "2, 3, 8, 3"}, plugins=LOCAL)
    assert played.trainer is not None
    assert (played.steps, played.trainer.updates) == (4, 3)


def test_the_memory_survives_a_resume_through_json() -> None:
    condition = GROWN.compile(3, {})
    before, after = condition.start(), condition.start()
    before.update((2.0,), (1,), EMPTY)
    after.restore(json.loads(json.dumps(before.state())))
    assert after.update((8.0,), (2,), EMPTY) == before.update((8.0,), (2,), EMPTY) == [(4.0, 2.0)]


# --- the action


def test_the_action_touches_its_file(tmp_path: Path) -> None:
    target = tmp_path / "new" / "look-here"
    rules = rule(metric="loss", when={"above": 5}, then=[{"healthcheck_example.touch": {"path": str(target)}}])
    played = play(rules, {"loss": "1 x3, 9"}, plugins=LOCAL)
    assert [outcome.done for outcome in played.alerts[0].actions] == [True]
    assert target.is_file()


def test_without_a_path_and_a_record_it_says_why_it_did_nothing() -> None:
    rules = rule(metric="loss", when={"above": 5}, then=["healthcheck_example.touch"])
    played = play(rules, {"loss": "1 x3, 9"}, plugins=LOCAL)
    [outcome] = played.alerts[0].actions
    assert not outcome.done
    assert "keeps no record" in outcome.text


# --- the rule pack


def test_the_pack_fires_when_the_weights_have_grown_tenfold() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    session = open_test_session(f"{PLUGIN}:starter", plugins=LOCAL)
    trainer = FakeTrainer(session, model=FakeModel({"weight": weight}))
    for _ in range(5):
        trainer.train_step(1.0)
        weight.data *= 3
    report = trainer.finish()
    assert [(alert["rule"], alert["fired_step"]) for alert in report["alerts"]] == [("weights-grow", 4)]
    assert report["rules"]["weights-grow"]["verdict"] == "warned"


# --- the report


def test_the_report_has_a_line_for_each_rule(tmp_path: Path) -> None:
    where = tmp_path / "table.txt"
    reports = {"healthcheck_example.table": str(where)}
    play(rule(metric="loss", when={"above": 5}), {"loss": "1 x3, 9"}, reports=reports, plugins=LOCAL)
    assert "mine: warned" in where.read_text(encoding="utf-8")


# --- the reader


def test_the_reader_reads_its_format_and_names_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("# healthcheck_example log\n1 loss=2.5 lr=0.1\nrubbish\n2 loss=nan\n", encoding="utf-8")
    assert LogReader().recognises(path, path.read_bytes()) == 1.0
    notes: list[str] = []
    rows = list(LogReader().read(path, notes))
    assert [position.step for position, _ in rows if position is not None] == [1, 2]
    assert rows[0][1] == {"loss": 2.5, "lr": 0.1}
    assert notes == ["line 3 is damaged: rubbish"]


def test_other_files_are_left_to_other_readers(tmp_path: Path) -> None:
    assert LogReader().recognises(tmp_path / "other.log", b"step 1 loss 2.5\n") == 0.0
