"""Slow phases that live: the compiler, an evaluation, a checkpoint. Standard library only, read from the watchdog's thread.

Such a phase has a budget of its own before its silence is judged: the ``first`` of the rules on silence, or five times the longest
one of its kind so far. While the compiler uses processor time, or a checkpoint is written, it lives, however long it takes.
What the training is doing is read from its stacks: no event says that a compiler has begun.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from types import FrameType

COMPILE, EVALUATION, CHECKPOINT = "compile", "evaluation", "checkpoint"
TIMES = 5.0
"""A phase may take so many times as long as the longest of its kind."""
BUSY = 0.05
"""Part of one core from which on a compiler counts as living. One that waits for a lock of another process uses none."""

_COMPILERS = (
    "torch._dynamo.convert_frame",
    "torch._dynamo.symbolic_convert",
    "torch._inductor.async_compile",
    "torch._inductor.codecache",
    "torch._inductor.graph",
    "torch._inductor.scheduler",
    "triton.compiler",
)
"""Modules whose functions are on a stack while something is compiled, and not while the result runs."""
_SAVERS = ("torch.serialization", "torch.distributed.checkpoint", "safetensors", "tensorstore", "torchsnapshot")
_SAVES = re.compile(r"^_?(?:async_)?save(?:_|$)|_save_checkpoint|^_?write_checkpoint")
_EVALUATES = re.compile(
    r"^_*(?:run_|do_)?(?:eval|evaluate|evaluation|val|valid|validate|validation|predict|generate)(?:_(?!.*train)|$)"
)
"""Not ``train_and_evaluate`` or ``eval_and_train``, in which a whole run takes place."""
_OWN = "healthcheck"


def phase_of(frames: Iterable[FrameType | None]) -> str:
    """What the innermost function of these threads that says so is doing; empty for a plain step.

    :param frames: the innermost frame of the main thread first, then those of others, of which only a compiler counts.
    """
    for place, innermost in enumerate(frames):
        frame = innermost
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            name = frame.f_code.co_name
            if module.startswith(_COMPILERS) or (module == "torch._inductor.compile_fx" and "compile" in name):
                return COMPILE
            if place == 0 and not module.startswith(_OWN):
                if _SAVES.search(name) or (module.startswith(_SAVERS) and "save" in name):
                    return CHECKPOINT
                if _EVALUATES.search(name):
                    return EVALUATION
            frame = frame.f_back
    return ""


class Phases:
    """Whether a silence is that of a phase within its budget.

    :param budget: seconds that every such phase has; asked each time, since rules may change.
    """

    def __init__(
        self,
        budget: Callable[[], float],
        *,
        processor_time: Callable[[], float] | None = None,
        written: Callable[[], int] | None = None,
    ) -> None:
        self._budget = budget
        self._processor_time = processor_time or job_processor_time
        self._written = written or bytes_written
        self._longest: dict[str, float] = {}
        self._phase = ""
        self._began = self._looked = self._age = 0.0
        self._progress = 0.0

    @property
    def going_on(self) -> bool:
        return self._phase != ""

    def excuses(self, phase: str, silent: float, now: float) -> bool:
        """Whether the training, silent for so long and in this phase, may go on without being judged.

        :param silent: a phase is as old as the silence in which it is seen first.
        """
        if phase != self._phase:
            self.over()
            self._phase, self._began = phase, now - silent
            self._looked, self._progress = now, self._measure(phase)
        if not phase:
            return False
        passed, before = now - self._looked, self._progress
        self._looked, self._progress = now, self._measure(phase)
        more = self._progress - before
        lives = more > 0 if phase == CHECKPOINT else phase == COMPILE and more > BUSY * passed
        age = now - self._began
        if lives or age < max(self._budget(), TIMES * self._longest.get(phase, 0.0)):
            self._age = age
            return True
        return False

    def over(self) -> None:
        """Something has happened, or another phase begins: what this one took is what its kind may take. A part of it that
        was not excused is not learnt."""
        if self._phase:
            self._longest[self._phase] = max(self._age, self._longest.get(self._phase, 0.0))
        self._phase, self._age = "", 0.0

    def _measure(self, phase: str) -> float:
        if phase == COMPILE:
            return self._processor_time()
        return float(self._written()) if phase == CHECKPOINT else 0.0


def bytes_written() -> int:
    """What this process has handed to files and sockets so far; 0 where the system does not say."""
    try:
        with open("/proc/self/io", encoding="ascii") as file:
            return int(next(line for line in file if line.startswith("wchar:")).split()[1])
    except (OSError, StopIteration, ValueError):
        return 0


def job_processor_time() -> float:
    """Seconds of processor time of this process and of those that it has started: compilers work in workers."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    try:
        ticks = os.sysconf("SC_CLK_TCK")
        waiting = [os.getpid()]
        while waiting:
            pid = waiting.pop()
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                    for child in map(int, file.read().split()):
                        waiting.append(child)
                        with open(f"/proc/{child}/stat", encoding="utf-8", errors="replace") as stat:
                            fields = stat.read().rpartition(")")[2].split()
                        total += (int(fields[11]) + int(fields[12])) / ticks
    except (OSError, ValueError, IndexError):
        pass  # another system, or a process that has just ended
    return total
