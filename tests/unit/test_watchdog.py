"""The watchdog: it sees a hang, and it knows people, stopped clocks and living phases."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from healthcheck.core.clock import LiveClock, VirtualClock
from healthcheck.run.actor import StopRequest, StopState
from healthcheck.run.watchdog import Watchdog, no_exit_here, waits_for_a_person
from healthcheck.testing.fake import FakeTrainer
from healthcheck.testing.playing import open_test_session

PATIENCE = 120.0


class Silences(list[float]):
    """Seconds of silence at each look of a watchdog."""

    def __init__(self) -> None:
        super().__init__()
        self._looked = threading.Condition()

    def append(self, seconds: float) -> None:
        with self._looked:
            super().append(seconds)
            self._looked.notify_all()

    def at_next_look(self) -> float:
        """What a look finds that begins after this call; it has ended when this returns.

        Of the next three looks the first may have begun earlier, and the third need not have ended.
        """
        with self._looked:
            looks = len(self) + 3
            assert self._looked.wait_for(lambda: len(self) >= looks, PATIENCE), "the watchdog does not look"
            return self[-1]


class Beat:
    """What a watchdog is given: a clock, when something last happened, who judges silence, and the stop of the run."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.last_event_at = self.clock.monotonic()
        self.silences = Silences()
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
    """One that looks a hundred times a second of real time; silence is counted in seconds of the beat's own clock."""
    return Watchdog(
        beat.clock,
        last_event=lambda: beat.last_event_at,
        silence=lambda seconds: beat.silence(seconds),
        stop=beat.stop,
        finish=beat.finish,
        note=beat.notes.append,
        **{"tick": 0.01, "late": 1.0, **options},
    ).start()


def test_silence_grows_while_nothing_happens_and_ends_with_an_event() -> None:
    beat = Beat()
    dog = watchdog(beat)
    assert beat.silences.at_next_look() == 0.0
    for silent in (0.5, 1.0, 1.5):
        beat.clock.advance(0.5)
        assert beat.silences.at_next_look() == silent
    beat.beat()
    assert beat.silences.at_next_look() == 0.0
    dog.stop()


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

    beat = Beat()
    dog = watchdog(beat)
    beat.clock.advance(0.5)
    assert beat.silences.at_next_look() == 0.5
    beat.clock.advance(3600)
    assert beat.silences.at_next_look() == 0.0
    dog.stop()
    assert max(beat.silences) == 0.5


def test_stop_ends_the_thread_and_may_be_called_twice() -> None:
    dog = watchdog(Beat())
    dog.stop()
    dog.stop()
    dog._thread.join(PATIENCE)
    assert not dog._thread.is_alive()


def test_a_failure_of_the_watchdog_is_said_and_breaks_nothing() -> None:
    beat = Beat()

    def fail(silent: float) -> None:
        raise RuntimeError("boom")

    beat.silence = fail  # type: ignore[method-assign]
    dog = watchdog(beat)
    dog._thread.join(PATIENCE)
    assert not dog._thread.is_alive()
    assert beat.notes == ["the watchdog failed and is off: RuntimeError: boom"]


# --------------------------------------------------------------------------- ending a hung process


def test_abort_writes_the_report_and_leaves_with_the_code_of_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("healthcheck.run.watchdog.no_exit_here", lambda: "")
    beat, codes = Beat(), []
    beat.stop_after = 0.5
    dog = watchdog(beat, grace=0.25, leave=codes.append)
    beat.clock.advance(0.5)
    beat.silences.at_next_look()
    assert (codes, beat.finished) == ([], 0)
    beat.clock.advance(0.25)
    dog._thread.join(PATIENCE)
    assert (codes, beat.finished) == ([17], 1)


def test_a_process_that_comes_back_within_the_grace_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("healthcheck.run.watchdog.no_exit_here", lambda: "")
    beat, codes = Beat(), []
    beat.stop_after = 0.5
    dog = watchdog(beat, grace=0.5, leave=codes.append)
    beat.clock.advance(0.5)
    beat.silences.at_next_look()
    assert beat.stop.request is not None
    beat.clock.advance(0.25)
    beat.beat()
    beat.silences.at_next_look()
    for _ in range(4):
        beat.clock.advance(0.5)
        beat.silences.at_next_look()
    dog.stop()
    assert (codes, beat.finished) == ([], 0)


def test_under_pytest_nothing_is_ended() -> None:
    assert no_exit_here() == "a test run"
    beat, codes = Beat(), []
    beat.stop_after = 0.5
    dog = watchdog(beat, grace=0.25, leave=codes.append)
    beat.clock.advance(0.5)
    beat.silences.at_next_look()
    beat.clock.advance(0.25)
    dog._thread.join(PATIENCE)
    assert codes == []
    assert beat.notes == ["the process hangs; it is not ended, because it is a test run"]


def test_a_process_that_pytest_started_may_be_ended() -> None:
    code = "from healthcheck.run.watchdog import no_exit_here; print(repr(no_exit_here()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "''"


# --------------------------------------------------------------------------- people

STAND = """
import sys, threading, time
from healthcheck.run.watchdog import waits_for_a_person

standing = threading.Event()

def stand():
    standing.set()
    time.sleep(600)

def look():
    # Code that works says when it does; a prompt cannot say that it waits, and is looked at until it does.
    waits, until = False, time.monotonic() + 120
    while not waits and time.monotonic() < until:
        working = standing.is_set()
        waits = waits_for_a_person(sys._current_frames().get(threading.main_thread().ident))
        if working:
            break
        time.sleep(0.01)
    print("WAITS", waits, flush=True)
    import os; os._exit(0)

threading.Thread(target=look, daemon=True).start()
"""


STANDS = {
    "working": ("stand()", "False"),
    "breakpoint": ("breakpoint()", "True"),
    "pdb": ("import pdb; pdb.Pdb(nosigint=True).set_trace(); stand()", "True"),
    "interact": ("import code; code.interact()", "True"),
    "shell-runs-code": ("import code; code.InteractiveConsole(globals()).push('stand()')", "False"),
    "cmd": ("import cmd; cmd.Cmd().cmdloop()", "True"),
    "under-pdb": (
        "import pdb; pdb.Pdb(nosigint=True, stdin=open('/dev/null')).run('stand()')",
        "True",
    ),
    # A trace function alone says nothing: coverage sets one, too.
    "coverage": (
        "def trace(frame, event, arg):\n    return trace\nsys.settrace(trace)\nstand()",
        "False",
    ),
}
"""What the main thread of a script with an open stdin does, and whether it waits for a person there."""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All of them at once: they wait more than they work."""
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
        process.communicate(timeout=PATIENCE)


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
