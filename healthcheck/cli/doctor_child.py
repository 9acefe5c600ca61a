"""One measured run of a script for ``healthcheck doctor``: so many steps, then it ends. A process of its own.

    python -m healthcheck.cli.doctor_child {bare|watched} STEPS OUT.json SCRIPT [ARG...]

Bare and watched runs are measured by the same hooks, so that their difference is what watching costs.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

WARM_UP = 5
"""Steps before the clock starts: allocation, compilation, the first look of each probe."""


class EnoughSteps(BaseException):
    """Ends the script from its optimizer's step; no ``except Exception`` swallows it."""


class Measure:
    """Counts steps of the first optimizer, keeps losses, and ends the run."""

    def __init__(self, steps: int, out: Path) -> None:
        self.steps = steps
        self.out = out
        self.losses: list[Any] = []
        self._first: Any = None
        self._count = 0
        self._began = 0.0
        self._cpu_began = 0.0
        self._times: list[float] = []

    def install(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        original = torch.Tensor.backward

        def backward(tensor: Any, *given: Any, **named: Any) -> Any:
            if tensor.numel() == 1:
                self.losses.append(tensor.detach().clone())
            return original(tensor, *given, **named)

        torch.Tensor.backward = backward
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._first is None:
            self._first = optimizer
        if optimizer is not self._first:
            return
        self._count += 1
        self._times.append(time.perf_counter())
        if self._count == min(WARM_UP, self.steps - 1):
            _synchronize()
            self._began = self._times[-1] = time.perf_counter()
            self._cpu_began = time.process_time()
        elif self._count == self.steps:
            self.save()
            raise EnoughSteps

    def save(self) -> None:
        """Write what was measured; also at the end of a script that takes fewer steps."""
        device = _synchronize()
        seconds = time.perf_counter() - self._began
        cpu = time.process_time() - self._cpu_began
        warm_up = min(WARM_UP, self.steps - 1)
        timed = self._count - warm_up
        known = bool(self._began) and timed > 0
        if known and not device:  # one disturbed step must not decide; on a device only the whole is known
            counted = self._times[warm_up - 1 :]
            seconds = timed * statistics.median(b - a for a, b in itertools.pairwise(counted))
        self.out.write_text(
            json.dumps(
                {
                    "steps": self._count,
                    "seconds_per_step": seconds / timed if known else None,
                    "cpu_seconds_per_step": cpu / timed if known else None,
                    "losses": [repr(float(loss)) for loss in self.losses],
                    "memory": _peak_memory(),
                }
            )
        )


def _synchronize() -> bool:
    """Wait for the device; whether there is one in use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        return True
    return False


def _peak_memory() -> dict[str, int]:
    from healthcheck.probes.memory_readings import peak_resident_bytes

    torch = sys.modules.get("torch")
    memory = {"host": peak_resident_bytes() or 0}
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        memory["device"] = int(torch.cuda.max_memory_allocated())
    return memory


def main() -> None:
    mode, steps, out, script, *arguments = sys.argv[1:]
    measure = Measure(int(steps), Path(out))
    measure.install()
    try:
        if mode == "watched":
            _watched(script, arguments)
        else:
            run_as_main(script, arguments)
    except EnoughSteps:
        pass
    finally:
        if not measure.out.exists():
            measure.save()
    leave()


def run_as_main(script: str, arguments: list[str]) -> None:
    """As ``python script arguments...`` would."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def leave() -> NoReturn:
    """End the process without the script's own exit functions: they belong to a run that came to its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _watched(script: str, arguments: list[str]) -> None:
    from healthcheck.assembly import open_session
    from healthcheck.instrument.script import ScriptTrainer
    from healthcheck.run.opening import SessionOptions

    session = open_session(SessionOptions(name=script, observe=True, argv=[script, *arguments], console=False))
    ScriptTrainer(session).run(script, arguments)


if __name__ == "__main__":
    main()
