"""What ``why`` says beside the numbers is said only where the record bears it out: each sentence meets a run for which it
is false."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from healthcheck.cli import main

SPIKES = [20.0 if i in (40, 41) else 2.0 + 0.001 * (i % 7) for i in range(60)]
RULES: dict[str, Any] = {
    "version": 1,
    "external": ["loss", "lr"],
    "rules": {
        "loss-spike": {"metric": "loss", "when": {"robust_z": {"above": 8, "window": 200}}, "for": 2, "warmup": 10},
        "lr-high": {"metric": "lr", "when": {"above": 100}},
    },
}
Says = Callable[..., str]


@pytest.fixture(scope="session")
def sessions(helper: Callable[[str], ModuleType]) -> ModuleType:
    return helper("tests/unit/reports/sessions.py")


@pytest.fixture
def why(here: Path, capsys: pytest.CaptureFixture[str]) -> Says:
    def call(*argv: str) -> str:
        capsys.readouterr()
        assert main(["why", *argv]) == 0
        return str(capsys.readouterr().out)

    return call


def run(sessions: ModuleType, lr: Sequence[float], loss: Sequence[float] = SPIKES) -> None:
    sessions.run({"loss": loss, "lr": lr}, rules=RULES, console=False)


class TestTheLearningRate:
    def test_that_did_not_move_is_unchanged_since_a_step_that_was_looked_at(
        self, why: Says, sessions: ModuleType
    ) -> None:
        run(sessions, [0.01] * 60)
        assert "lr unchanged at 0.01 since step 21" in why()

    def test_that_doubles_under_a_schedule_is_not_called_unchanged(self, why: Says, sessions: ModuleType) -> None:
        run(sessions, [0.001 * 1.035**i for i in range(60)])
        text = why()
        assert "unchanged" not in text
        found = re.search(r"lr ([\d.]+) -> ([\d.]+) from step 21 to 42", text)
        assert found is not None
        assert float(found[2]) == pytest.approx(0.001 * 1.035**41, rel=0.01)

    def test_that_changed_by_little_is_not_called_unchanged(self, why: Says, sessions: ModuleType) -> None:
        run(sessions, [0.01 if i < 30 else 0.0101 for i in range(60)])
        assert "lr 0.01 -> 0.0101 from step 21 to 42" in why()

    def test_that_went_up_and_down_again_says_how_far(self, why: Says, sessions: ModuleType) -> None:
        run(sessions, [0.0102 if 25 < i < 35 else 0.01 for i in range(60)])
        assert "lr 0.01 -> 0.01 from step 21 to 42, between 0.01 and 0.0102" in why()

    def test_of_which_only_the_end_was_seen_is_not_mentioned(self, why: Says, sessions: ModuleType) -> None:
        run(sessions, [*[None] * 40, *[0.01] * 20])  # type: ignore[list-item]
        assert "lr" not in why().partition("around")[2]


class TestTheRecordJudgedAgain:
    RULES: ClassVar[dict[str, Any]] = {
        "version": 1,
        "external": ["kl"],
        "rules": {"kl-high": {"metric": "kl", "when": {"above": 0.2}, "for": 3, "then": ["warn"]}},
    }

    def _logged_late(self, values: Sequence[float]) -> None:
        """A script that logs after its step: the engine sees the value during the next one."""
        from healthcheck.assembly import open_session
        from healthcheck.core.events import Event, EventKind
        from healthcheck.run.ending import Ending

        session = open_session(target="train.py", rules=self.RULES, console=False)
        for step, value in enumerate(values, start=1):
            session.emit(Event(EventKind.STEP_START, step))
            session.emit(Event(EventKind.STEP_END, step))
            session.log({"kl": value}, step=step)
        session.finish(Ending(script_exit_code=0))

    def test_gives_an_alert_of_a_value_that_was_logged_after_its_step(self, why: Says) -> None:
        self._logged_late([i / 100 for i in range(60)])
        text = why()
        assert "kl-high fired at step 24" in text
        assert "note" not in text
        rows = re.findall(r"^ +(\d+) +([\d.]+) +(\S.*)$", text, re.MULTILINE)
        assert rows[:5] == [
            ("20", "0.19", "ok"),
            ("21", "0.2", "ok"),
            ("22", "0.21", "pending 1 of 3"),
            ("23", "0.22", "pending 2 of 3"),
            ("24", "0.23", "FIRING -> reported"),
        ]

    def test_says_where_it_fires_instead_if_the_record_was_altered(self, why: Says, here: Path) -> None:
        self._logged_late([i / 100 for i in range(60)])
        samples = next(here.glob("*/samples.jsonl"))
        text = samples.read_text(encoding="utf-8")
        assert '"kl":0.23}' in text
        samples.write_text(text.replace('"kl":0.23}', '"kl":0.1}'), encoding="utf-8")
        assert "judged again from the record alone, kl-high fires at step 27 instead" in why()


def test_an_alert_of_a_run_that_goes_on_is_not_said_to_fire_at_the_end(
    why: Says, here: Path, going_on: Callable[..., Any], wait_until: Callable[..., None]
) -> None:
    live = going_on([2.0 + 0.01 * (i % 7) for i in range(40)] + [20.0 * 1.05**i for i in range(2000)], 0.01)
    wait_until(lambda: any(f.stat().st_size for f in here.glob("*/alerts.jsonl")), "an alert of the run")
    assert "loss-spike fired at step 42, not cleared so far" in why("loss-spike")
    live.end()
