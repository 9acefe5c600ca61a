"""Slow phases that live are not mistaken for a hang: their stacks, their budgets, and what they learn."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from healthcheck.run.phases import BUSY, Phases, bytes_written, job_processor_time, phase_of


class Progress:
    def __init__(self) -> None:
        self.processor, self.bytes = 0.0, 0


@pytest.fixture
def progress() -> Progress:
    return Progress()


@pytest.fixture
def phases(progress: Progress) -> Phases:
    return Phases(lambda: 100.0, processor_time=lambda: progress.processor, written=lambda: progress.bytes)


def seen(phases: Phases, phase: str, first: int, last: int) -> list[bool]:
    """What every tenth second of a silence says, of which the first look comes after ten."""
    return [phases.excuses(phase, 10, second) for second in range(first, last + 1, 10)]


@pytest.mark.parametrize("phase", ["compile", "evaluation", "checkpoint"])
def test_a_phase_has_its_budget_and_no_more(phases: Phases, phase: str) -> None:
    assert seen(phases, phase, 10, 90) == [True] * 9
    assert seen(phases, phase, 100, 120) == [False] * 3


def test_a_plain_step_has_none(phases: Phases) -> None:
    assert seen(phases, "", 10, 30) == [False] * 3


def test_a_compiler_that_works_and_a_checkpoint_that_grows_are_excused_for_as_long_as_they_do(
    phases: Phases, progress: Progress
) -> None:
    for second in range(10, 1000, 10):
        progress.processor += 10 * BUSY * 2
        assert phases.excuses("compile", 10, second)
    assert not phases.excuses("compile", 10, 1010)
    phases.over()
    for second in range(2000, 3000, 10):
        progress.bytes += 4096
        assert phases.excuses("checkpoint", 10, second)
    assert not phases.excuses("checkpoint", 10, 3010)


def test_an_evaluation_that_burns_processor_time_may_still_hang(phases: Phases, progress: Progress) -> None:
    seen(phases, "evaluation", 10, 90)
    progress.processor = 1e6
    assert not phases.excuses("evaluation", 10, 110)


def test_what_a_phase_took_is_learnt_once_something_has_happened(phases: Phases) -> None:
    seen(phases, "evaluation", 10, 90)
    assert not phases.excuses("evaluation", 10, 110)
    phases.over()
    assert all(seen(phases, "evaluation", 1010, 1440))  # five times 90 s
    phases.over()
    assert phases.excuses("compile", 10, 2000)
    assert not phases.excuses("compile", 10, 2200), "another phase has a limit of its own"


def test_a_phase_that_follows_another_begins_anew(phases: Phases) -> None:
    seen(phases, "evaluation", 10, 90)
    assert phases.excuses("checkpoint", 10, 110)


def frame_in(function: Callable[[Callable[[], None]], None]) -> tuple[str, ...]:
    """The phase that the stack of a thread says which is inside ``function``."""
    there, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        there.set()
        go_on.wait(60)

    thread = threading.Thread(target=function, args=(stop,))
    thread.start()
    assert there.wait(60)
    frame: FrameType | None = sys._current_frames()[thread.ident or 0]
    found = phase_of([frame])
    go_on.set()
    thread.join()
    return (found,)


def evaluate(stop: Callable[[], None]) -> None:
    stop()


def train_and_evaluate(stop: Callable[[], None]) -> None:
    stop()


def saving(stop: Callable[[], None]) -> None:
    class Slow(io.BytesIO):
        def write(self, data: object) -> int:
            stop()
            return super().write(data)  # type: ignore[arg-type]

    torch.save({"w": torch.ones(3)}, Slow())


def compiling(stop: Callable[[], None]) -> None:
    def backend(graph: object, inputs: object) -> object:
        stop()
        return graph.forward  # type: ignore[attr-defined]

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))


def running_compiled(stop: Callable[[], None]) -> None:
    @torch.compiler.disable
    def inside(x: torch.Tensor) -> torch.Tensor:
        stop()
        return x

    def work(x: torch.Tensor) -> torch.Tensor:
        return inside(x + 1) * 2

    compiled = torch.compile(work, backend="eager")
    real, stop = stop, lambda: None
    compiled(torch.ones(2))
    stop = real
    compiled(torch.ones(2))


@pytest.mark.parametrize(
    ("function", "phase"),
    [
        (evaluate, "evaluation"),
        (train_and_evaluate, ""),
        (saving, "checkpoint"),
        (compiling, "compile"),
        (running_compiled, ""),
    ],
)
def test_stacks_say_which_phase_it_is(function: Callable[[Callable[[], None]], None], phase: str) -> None:
    assert frame_in(function) == (phase,)


def test_progress_is_that_of_the_job() -> None:
    before, wrote = job_processor_time(), bytes_written()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    with open("/dev/null", "wb") as file:
        file.write(b"x" * 100_000)
    assert job_processor_time() - before >= 0.15
    if sys.platform == "linux":
        assert bytes_written() - wrote >= 100_000
