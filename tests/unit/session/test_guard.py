"""Where the boundary to foreign code ends: a real Ctrl-C, a signal handler of the script, code that does not come back."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from healthcheck import hookimpl
from healthcheck.core.clock import LiveClock
from healthcheck.extend.dispatch import Dispatch
from healthcheck.extend.guard import describe, is_ctrl_c, running_in
from healthcheck.readers.base import UnreadableRunError
from healthcheck.readers.find import recognise
from healthcheck.run.actor import StopState
from healthcheck.run.watchdog import Watchdog
from healthcheck.testing import FakeTrainer, open_test_session


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """As in a terminal: a shell starts what it runs in the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def caught(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def spin() -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        pass


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_is_told_from_a_plugin_that_raises_the_same() -> None:
    def pressed() -> None:
        signal.raise_signal(signal.SIGINT)

    def pressed_in_a_loop() -> None:
        threading.Timer(0.05, _thread.interrupt_main).start()
        spin()

    def kept_and_raised_again() -> None:
        try:
            pressed()
        except KeyboardInterrupt:
            raise

    def written() -> None:
        raise KeyboardInterrupt

    def written_for_another() -> None:
        try:
            raise ValueError
        except ValueError as error:
            raise KeyboardInterrupt from error

    assert [is_ctrl_c(caught(f)) for f in (pressed, pressed_in_a_loop, kept_and_raised_again)] == [True] * 3
    assert [is_ctrl_c(caught(f)) for f in (written, written_for_another)] == [False] * 2


class Interrupted:
    name = "interrupted"

    @hookimpl
    def healthcheck_step_end(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_while_a_plugin_runs_ends_the_training() -> None:
    session = open_test_session(callbacks=[Interrupted()])
    with pytest.raises(KeyboardInterrupt):
        FakeTrainer(session).train_step(1.0)
    assert session.dispatch.errors == []


def test_what_a_signal_handler_of_the_script_raises_while_a_plugin_runs_is_the_scripts() -> None:
    def out_of_time(number: int, frame: Any) -> None:
        raise TimeoutError("the script's own limit")

    class Alarmed:
        name = "alarmed"

        @hookimpl
        def healthcheck_step_end(self) -> None:
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, out_of_time)
    try:
        session = open_test_session(callbacks=[Alarmed()])
        with pytest.raises(TimeoutError):
            FakeTrainer(session).train_step(1.0)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_error_without_a_text_of_its_own_is_named_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise SystemExit(3)

    assert describe(Mute()) == "Mute (whose own text cannot be had: SystemExit)"
    assert describe(ValueError("x" * 10_000)).endswith("x")
    assert len(describe(ValueError("x" * 10_000))) < 2_100


def test_the_watchdog_names_a_plugin_that_hangs_with_its_stack_and_does_not_end_it() -> None:
    said: list[str] = []
    released = threading.Event()

    def stands_still(session: Any, event: Any) -> None:
        while not released.is_set():
            time.sleep(0.01)

    dispatch = Dispatch()
    dispatch.on("step_end", stands_still, owner="slowpoke")
    watchdog = Watchdog(
        LiveClock(),
        last_event=lambda: 0.0,
        silence=lambda seconds: released.set() if said else None,
        stop=StopState(),
        finish=lambda: None,
        note=said.append,
        tick=0.05,
        plugin_hangs=0.1,
        leave=lambda code: said.append("the process was ended"),
    ).start()
    dispatch.call("step_end", 1, None, None)
    watchdog.stop()
    (line,) = said
    assert 'for the plugin "slowpoke" in step_end: ' in line
    assert f"{__file__}:" in line
    assert "in stands_still" in line


def test_between_two_calls_a_thread_is_in_nobodys_code() -> None:
    assert running_in(sys._getframe()) is None


def test_a_reader_that_raises_is_named_where_nobody_else_knows_the_file(tmp_path: Path) -> None:
    class Reader:
        name = "acme"
        help = ""

        def recognises(self, path: Path, head: bytes) -> float:
            raise SystemExit(4)

        def read(self, path: Path, notes: list[str]) -> Any: ...

    file = tmp_path / "a.bin"
    file.write_bytes(b"x")
    with pytest.raises(UnreadableRunError, match=r"the reader acme raised SystemExit: 4 \(.*test_guard.py:\d+\)"):
        recognise(file, {"acme": Reader()})


CONDITION = """
import healthcheck

class Scorer:
    normal, memoryless = None, False
    def update(self, values, steps, quiet): raise SystemExit(5)
    def bound(self, healthy): return None
    def state(self): return None
    def restore(self, state): pass

@healthcheck.hookimpl
def healthcheck_register_conditions(register):
    threshold = healthcheck.Threshold("above", 1.0)
    register(healthcheck.ConditionType(
        "acme.leave", {"type": "object"}, lambda options, rule: healthcheck.CompiledCondition("acme.leave", threshold, Scorer)
    ))
"""


def test_a_condition_that_raises_in_replay_costs_its_rule_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from healthcheck.cli import main

    monkeypatch.chdir(tmp_path)
    Path("acme.py").write_text(CONDITION)
    Path("log.csv").write_text("step,loss\n1,1.0\n2,5.0\n3,1.0\n")
    Path("rules.yaml").write_text(
        "version: 1\nrules:\n  theirs: {metric: loss, when: {acme.leave: {}}}\n  ours: {metric: loss, when: {above: 3}, severity: error}\n"
    )
    assert main(["replay", "-p", "acme.py", "--rules", "rules.yaml", "log.csv", "--report", "json=out.json"]) == 1
    out = capfd.readouterr().out
    assert "  not judged  theirs: its condition acme.leave raised SystemExit: 5" in out
    assert "1 of 2 checks that apply were judged\nhealthcheck: FAILED, 1 alert at or above error" in out
    assert "internal error" not in out
    assert "its condition acme.leave raised SystemExit: 5" in Path("out.json").read_text()
