"""The watchdog: it sees a hang, and it knows people, stopped clocks and living phases."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from healthcheck.clock import LiveClock
from healthcheck.latch import StopRequest, StopState
from healthcheck.testing.fake import FakeTrainer
from healthcheck.testing.playing import open_test_session
from healthcheck.watchdog import Watchdog, no_exit_here, waits_for_a_person


class Beat:
    """What a watchdog is given: a clock, when something last happened, who judges silence, and the stop of the run."""

    def __init__(self) -> None:
        self.clock = LiveClock()
        self.last_event_at = self.clock.monotonic()
        self.silences: list[float] = []
        self.stop = StopState()
        self.stop_after: float | None = None
        self.notes: list[str] = []
        self.finished = 0

    def beat(self) -> None:
        self.last_event_at = self.clock.monotonic()

    def silence(self, seconds: float) -> None:
        self.silences.append(seconds)
        if self.stop_after is not None and seconds >= self.stop_after and self.stop.request is None:
            self.stop.request = StopRequest("hang", 1, "nothing happens", mode="abort", exit_code=17)

    def finish(self) -> None:
        self.finished += 1


def watchdog(beat: Beat, **options: Any) -> Watchdog:
    return Watchdog(
        beat.clock,
        last_event=lambda: beat.last_event_at,
        silence=lambda seconds: beat.silence(seconds),
        stop=beat.stop,
        finish=beat.finish,
        note=beat.notes.append,
        **{"tick": 0.05, "late": 1.0, **options},
    ).start()


def test_silence_grows_while_nothing_happens_and_ends_with_an_event() -> None:
    beat = Beat()
    dog = watchdog(beat)
    time.sleep(0.5)
    grown = max(beat.silences)
    assert grown > 0.3
    beat.beat()
    beat.silences.clear()
    time.sleep(0.12)
    dog.stop()
    assert max(beat.silences) < 0.3


SILENCE = {"metric": "heartbeat", "when": {"stale": "5m"}, "severity": "warning"}
LOSS = {"metric": "loss", "when": {"above": 9}}


@pytest.mark.parametrize(("rule", "threads"), [(LOSS, 0), (SILENCE, 1)])
def test_a_thread_exists_only_where_a_rule_is_on_silence_and_ends_with_the_run(
    rule: dict[str, Any], threads: int
) -> None:
    session = open_test_session({"version": 1, "rules": {"r": rule}}, clock=LiveClock())
    before = threading.active_count()
    trainer = FakeTrainer(session)
    assert threading.active_count() == before + threads
    trainer.finish()
    assert threading.active_count() == before


def test_a_tick_that_came_far_too_late_restarts_the_budget() -> None:
    """Ctrl-Z, a sleeping laptop, a paused container: the process stood still, not the training."""

    class Jumping(LiveClock):
        offset = 0.0

        def monotonic(self) -> float:  # type: ignore[override]
            return time.monotonic() + self.offset

    beat = Beat()
    beat.clock = Jumping()
    beat.beat()
    dog = watchdog(beat)
    time.sleep(0.15)
    beat.clock.offset = 3600.0  # type: ignore[attr-defined]
    time.sleep(0.3)
    dog.stop()
    assert beat.silences
    assert max(beat.silences) < 1.0


def test_stop_ends_the_thread_and_may_be_called_twice() -> None:
    dog = watchdog(Beat())
    dog.stop()
    dog.stop()
    assert not dog._thread.is_alive()


def test_a_failure_of_the_watchdog_is_said_and_breaks_nothing() -> None:
    beat = Beat()

    def fail(silent: float) -> None:
        raise RuntimeError("boom")

    beat.silence = fail  # type: ignore[method-assign]
    dog = watchdog(beat)
    time.sleep(0.2)
    assert not dog._thread.is_alive()
    assert beat.notes == ["the watchdog failed and is off: RuntimeError: boom"]


# --------------------------------------------------------------------------- ending a hung process


def test_abort_writes_the_report_and_leaves_with_the_code_of_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("healthcheck.watchdog.no_exit_here", lambda: "")
    beat, codes = Beat(), []
    beat.stop_after = 0.1
    dog = watchdog(beat, grace=0.2, leave=codes.append)
    time.sleep(0.8)
    dog.stop()
    assert (codes, beat.finished) == ([17], 1)


def test_a_process_that_comes_back_within_the_grace_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("healthcheck.watchdog.no_exit_here", lambda: "")
    beat, codes = Beat(), []
    beat.stop_after = 0.1
    dog = watchdog(beat, grace=0.4, leave=codes.append)
    time.sleep(0.25)
    beat.beat()
    time.sleep(0.6)
    dog.stop()
    assert (codes, beat.finished) == ([], 0)


def test_under_pytest_nothing_is_ended() -> None:
    assert no_exit_here() == "a test run"
    beat, codes = Beat(), []
    beat.stop_after = 0.1
    watchdog(beat, grace=0.1, leave=codes.append)
    time.sleep(0.5)
    assert codes == []
    assert beat.notes == ["the process hangs; it is not ended, because it is a test run"]


def test_a_process_that_pytest_started_may_be_ended() -> None:
    code = "from healthcheck.watchdog import no_exit_here; print(repr(no_exit_here()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "''"


# --------------------------------------------------------------------------- people

STAND = """
import sys, threading, time
from healthcheck.watchdog import waits_for_a_person

def look():
    time.sleep(0.7)
    frame = sys._current_frames().get(threading.main_thread().ident)
    print("WAITS", waits_for_a_person(frame), flush=True)
    import os; os._exit(0)

threading.Thread(target=look, daemon=True).start()
"""


STANDS = {
    "working": ("time.sleep(5)", "False"),
    "breakpoint": ("breakpoint()", "True"),
    "pdb": ("import pdb; pdb.Pdb(nosigint=True).set_trace(); time.sleep(5)", "True"),
    "interact": ("import code; code.interact()", "True"),
    "shell-runs-code": ("import code; code.InteractiveConsole().push('import time; time.sleep(5)')", "False"),
    "cmd": ("import cmd; cmd.Cmd().cmdloop()", "True"),
    "under-pdb": (
        "import pdb; pdb.Pdb(nosigint=True, stdin=open('/dev/null')).run('import time; time.sleep(5)')",
        "True",
    ),
    # A trace function alone says nothing: coverage sets one, too.
    "coverage": (
        "def trace(frame, event, arg):\n    return trace\ndef work():\n    time.sleep(5)\nsys.settrace(trace)\nwork()",
        "False",
    ),
}
"""What the main thread of a script with an open stdin does, and whether it waits for a person there."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All of them at once: each takes most of a second of doing nothing."""
    started = {}
    for name, (body, _) in STANDS.items():
        script = tmp_path_factory.mktemp("stand") / "script.py"
        script.write_text(STAND + body)
        started[name] = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    yield started
    for process in started.values():
        process.communicate(timeout=20)


@pytest.mark.parametrize("name", STANDS)
def test_a_debugger_or_a_prompt_waits_for_a_person_and_work_does_not(
    name: str, scripts: dict[str, subprocess.Popen[str]]
) -> None:
    said = scripts[name].stdout
    assert said is not None
    assert next(line.split("WAITS ")[1].strip() for line in said if "WAITS" in line) == STANDS[name][1]


def test_a_main_thread_without_python_code_waits_for_a_person_only_in_an_interactive_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not waits_for_a_person(None)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert waits_for_a_person(None)
