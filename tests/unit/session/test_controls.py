"""The stop of a run and the controls in front of the trainer's, on their own: one process, and several ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from healthcheck.core.alerts import Alert, Severity
from healthcheck.core.errors import StopTraining, UsageError
from healthcheck.core.events import EventKind
from healthcheck.core.protocols import Capabilities
from healthcheck.core.runinfo import RunInfo
from healthcheck.instrument.controls import StopSwitch
from healthcheck.rulelang.rule import Mute
from healthcheck.run.actor import CHECKPOINT, SessionControls, StopState


class Trainer:
    """A trainer's controls that remember what was asked of them."""

    device: Any = None
    ranks_cannot_save = ""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.capabilities = Capabilities("test", frozenset(EventKind), frozenset())

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str = "graceful", exit_code: int = 1) -> None:
        self.asked.append(f"stop by {rule or 'user'} at {step}")

    def skip_update(self) -> bool:
        self.asked.append("skip")
        return True

    def request_checkpoint(self, path: Path | None = None) -> str:
        self.asked.append(f"save to {path}")
        return str(path)

    def scale_lr(self, factor: float) -> list[float]:
        return [factor]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.asked.append("log")


class Ranks:
    """An agreement that decides what a test says."""

    ready = True
    broken = ""

    def __init__(self) -> None:
        self.proposed: list[Mapping[str, Any]] = []
        self.withdrawn: list[str] = []
        self.decides: Sequence[Mapping[str, Any]] = ()

    def propose(self, request: Mapping[str, Any]) -> None:
        self.proposed.append(request)

    def withdraw(self, rule: str) -> None:
        self.withdrawn.append(rule)

    def exchange(self, step: int) -> Sequence[Mapping[str, Any]]:
        return self.decides

    def close(self) -> None: ...

    def leave(self, *, failing: bool, hurried: Any) -> None: ...


def controls(ranks: int = 1) -> tuple[SessionControls, Trainer, list[str]]:
    trainer, notes, info = Trainer(), list[str](), RunInfo("t", world_size=ranks)
    made = SessionControls(trainer, stop=StopState(), info=info, note=notes.append, mute=list[Mute]().append)
    return made, trainer, notes


def alert(rule: str, acted: int | None) -> Alert:
    made = Alert(rule, 1, Severity.ERROR, "train", 1, 1, 1, 0.0, None, None, "", [], 1)
    made.acted_step = acted
    return made


def test_the_first_stop_wins_and_later_ones_only_add_their_rules() -> None:
    run, trainer, _ = controls()
    run.request_stop("bad", rule="first", step=3)
    run.request_stop("worse", rule="second", step=4, exit_code=9)
    run.request_stop("asked for 5 steps", rule="", step=5)
    request = run.stop.request
    assert request is not None
    assert (request.rule, request.step, request.exit_code, request.also) == ("first", 3, 1, ["second"])
    assert trainer.asked == ["stop by first at 3"]


def test_a_rules_stop_takes_the_place_of_the_users_own() -> None:
    run, _, _ = controls()
    run.request_stop("asked for 5 steps", rule="", step=5, exit_code=0)
    run.request_stop("bad", rule="first", step=5)
    assert run.stop.request is not None
    assert (run.stop.request.rule, run.stop.request.also) == ("first", None)


def test_a_trainer_that_takes_over_is_asked_for_the_stop_too() -> None:
    run, _, _ = controls()
    later = Trainer()
    run.request_stop("bad", rule="first", step=3)
    run.take_over(later)
    assert later.asked == ["stop by first at 3"]


def test_the_stop_is_raised_wherever_an_adapter_asks_until_a_framework_ends_its_loop_itself() -> None:
    run, _, _ = controls()
    gave_up: list[int] = []
    one, other = StopSwitch(run.stop), StopSwitch(run.stop, lambda: gave_up.append(run.stop.raised))
    one.check()
    run.request_stop("bad", rule="first", step=3, exit_code=7)
    with pytest.raises(StopTraining, match="bad") as raised:
        one.check()
    assert (raised.value.rule, raised.value.step, raised.value.exit_code) == ("first", 3, 7)
    run.stop.by_framework = True
    other.check()
    run.stop.by_framework = False
    for _ in range(3):  # both speak of one run: its patience is not counted by each of them
        with pytest.raises(StopTraining):
            other.check()
    assert gave_up == [3]


def test_with_several_ranks_a_stop_is_proposed_and_carried_out_once_all_have_agreed() -> None:
    run, trainer, notes = controls(ranks=2)
    ranks = run.agreement = Ranks()
    run.order, run.unanimous = {"first": (2, 0)}, {"first"}
    run.request_stop("bad", rule="first", step=3)
    assert run.stop.request is None
    assert (ranks.proposed[0]["rule"], ranks.proposed[0]["unanimous"], ranks.proposed[0]["severity"]) == (
        "first",
        True,
        2,
    )
    ranks.decides = [{"rule": "first", "step": 3, "reason": "bad", "mode": "graceful", "exit_code": 1, "ranks": [0]}]
    acted, other = alert("first", 3), alert("second", 3)
    run.exchange(8, [acted, other])
    assert run.stop.request is not None
    assert (run.stop.request.step, acted.acted_step, other.acted_step) == (8, 8, 3)
    assert trainer.asked == ["stop by first at 8"]
    assert notes == ["all ranks stop at step 8: first on rank 0 only, first seen at step 3"]


def test_the_users_own_stop_needs_no_agreement_because_all_ranks_count_the_same_steps() -> None:
    run, trainer, _ = controls(ranks=2)
    run.agreement = Ranks()
    run.request_stop("asked for 5 steps", rule="", step=5)
    assert trainer.asked == ["stop by user at 5"]


def test_an_episode_that_is_over_withdraws_what_all_ranks_would_have_had_to_ask_for() -> None:
    run, _, _ = controls(ranks=2)
    ranks = run.agreement = Ranks()
    run.unanimous = {"first"}
    run.recovered(["first"])
    run.recovered(["second"])
    assert ranks.withdrawn == ["first"]


def test_several_ranks_save_together_at_one_place(tmp_path: Path) -> None:
    run, trainer, notes = controls(ranks=2)
    ranks = run.agreement = Ranks()
    assert run.request_checkpoint() == "on all ranks, at their next sync point"
    assert ranks.proposed == [{"rule": CHECKPOINT, "path": ""}]
    ranks.decides = [{"rule": CHECKPOINT, "path": "", "folder": "record", "rank": 1}]
    run.exchange(6, [])
    assert trainer.asked == ["save to record/checkpoints/step-6"]
    assert notes == ["all ranks save at step 6, as asked by rank 1: record/checkpoints/step-6"]
    with pytest.raises(UsageError, match="exists already"):
        run.request_checkpoint(tmp_path)


def test_ranks_that_cannot_save_together_say_why() -> None:
    run, trainer, _ = controls(ranks=2)
    with pytest.raises(UsageError, match="2 ranks cannot agree on it"):
        run.request_checkpoint()
    trainer.ranks_cannot_save = "nobody says which part"
    with pytest.raises(UsageError, match="nobody says which part"):
        run.request_checkpoint()


def test_an_update_is_not_skipped_for_a_rule_that_other_ranks_may_not_see() -> None:
    run, trainer, _ = controls()
    assert run.skip_update() is True
    run.may_skip = False
    assert run.skip_update() is False
    assert trainer.asked == ["skip"]
