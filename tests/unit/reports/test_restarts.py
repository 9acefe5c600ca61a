"""The same stop for the third time: DO-NOT-RESTART."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAN = math.nan


def newest(runs: Path) -> Path:
    return (runs / "latest").resolve()


def test_the_third_stop_at_the_same_step_leaves_the_file_and_says_so(watched: Callable[..., Any], runs: Path) -> None:
    for attempt in (1, 2):
        ended = watched(series={"loss": [1.0, NAN]})
        assert ended.returncode == 1
        assert not (newest(runs) / "DO-NOT-RESTART").exists(), attempt
    ended = watched(series={"loss": [1.0, NAN]})
    text = (newest(runs) / "DO-NOT-RESTART").read_text()
    assert text.startswith("train.py was stopped 3 times by loss-not-finite at step 2.\n")
    assert "wrote DO-NOT-RESTART" in ended.stderr
    report = json.loads((newest(runs) / "report.json").read_text())
    assert report["stop"]["times"] == 3


def test_a_fourth_one_says_it_again(watched: Callable[..., Any], runs: Path) -> None:
    for _ in range(4):
        watched(series={"loss": [NAN]})
    assert "4 times" in (newest(runs) / "DO-NOT-RESTART").read_text()


def test_stops_at_different_steps_or_of_other_scripts_do_not_add_up(watched: Callable[..., Any], runs: Path) -> None:
    watched(series={"loss": [1.0, NAN]})
    watched(series={"loss": [1.0, 1.0, NAN]})
    watched(series={"loss": [1.0, NAN]}, target="other.py")
    watched(series={"loss": [1.0, NAN]})
    assert not list(runs.glob("*/DO-NOT-RESTART"))


def test_a_run_that_got_past_the_step_ends_the_row(watched: Callable[..., Any], runs: Path) -> None:
    """Then it was luck, or somebody mended it."""
    watched(series={"loss": [1.0, NAN]})
    watched(series={"loss": [1.0, NAN]})
    watched(series={"loss": [1.0] * 9})
    watched(series={"loss": [1.0, NAN]})
    assert not list(runs.glob("*/DO-NOT-RESTART"))


def test_observing_stops_nothing_and_counts_nothing(watched: Callable[..., Any], runs: Path) -> None:
    for _ in range(3):
        watched(series={"loss": [1.0, NAN]}, settings={"mode": "observe"})
    assert not list(runs.glob("*/DO-NOT-RESTART"))


def test_the_exit_code_is_the_one_that_the_rule_asks_for(watched: Callable[..., Any]) -> None:
    rules = {
        "version": 1,
        "rules": {"r": {"metric": "loss", "when": "nonfinite", "then": [{"stop": {"exit_code": 42}}]}},
    }
    ended = watched(series={"loss": [NAN]}, rules=rules)
    assert ended.returncode == 42
    assert "exit 42" in ended.stderr


def test_other_arguments_are_another_job_and_where_to_resume_is_not_an_argument_of_the_job() -> None:
    from healthcheck.record.restarts import _job

    assert _job(["train.py", "--lr", "1"]) != _job(["train.py", "--lr", "2"])
    assert _job(["train.py", "--lr", "1", "--resume", "ckpt/18000"]) == _job(["train.py", "--lr", "1"])
    assert _job(["train.py", "--resume_from_checkpoint=a", "--fp16"]) == _job(["train.py", "--fp16"])


def test_a_test_that_fails_again_is_no_job_that_somebody_restarts(watched: Callable[..., Any], runs: Path) -> None:
    for _ in range(3):
        watched(series={"loss": [NAN]}, target="tests/test_train.py::test_it_learns")
    assert not list(runs.glob("*/DO-NOT-RESTART"))
