"""``healthcheck mute``: a rule of a run that goes on is silenced, with a reason that stands in the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healthcheck.cli import main
from healthcheck.record.runs import find_run

GoingOn = Callable[..., Any]
REASON = "new data mix"


@pytest.mark.slow
def test_a_rule_of_a_run_that_goes_on_is_muted_and_the_report_says_why(
    going_on: GoingOn, here: Path, wait_until: Callable[..., None]
) -> None:
    spiky = [20.0 if step % 40 in (38, 39) else 2.0 + 0.01 * (step % 7) for step in range(40)]
    child = going_on(spiky, 0.02)
    assert main(["mute", "latest", "loss-spike", "--for", "10000", "--reason", REASON]) == 0
    wait_until(lambda: any(alert.get("muted") for alert in find_run().alerts), "a muted alert")
    assert child.end() == 0
    report = json.loads((here / "latest" / "report.json").read_text())
    (mute,) = report["mutes"]
    assert (mute["rule"], mute["reason"]) == ("loss-spike", REASON)
    assert mute["hits"] >= 1
    assert report["alerts"][-1]["muted"] == REASON


def test_a_rule_for_nan_wants_force(going_on: GoingOn, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    going_on([2.0], 0.02)
    asked = ["mute", "latest", "loss-not-finite", "--for", "10", "--reason", REASON]
    assert main(asked) == 4
    assert "would hide NaN and infinity" in capsys.readouterr().err
    assert not list(here.glob("*/requests.jsonl"))
    assert main([*asked, "--force"]) == 0
    assert main(["mute", "latest", "los-spike", "--for", "10", "--reason", REASON]) == 4
    assert 'did you mean "loss-spike"?' in capsys.readouterr().err


def test_a_run_that_has_ended_cannot_be_muted(
    going_on: GoingOn, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    going_on([2.0], 0.01).end()
    assert main(["mute", "latest", "loss-spike", "--for", "10", "--reason", REASON]) == 4
    assert "has ended (ok); for the next one: --mute loss-spike@A..B" in capsys.readouterr().err
