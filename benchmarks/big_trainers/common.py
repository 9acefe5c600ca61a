"""What the training scripts beside this file share: arguments, seeds, and what they print."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from importlib.metadata import version
from typing import Any

import torch


class Script:
    """Prints each loss exactly, and at the end whether the weights are finite."""

    def __init__(self, package: str) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int, default=30)
        parser.add_argument("--nan-at", type=int, default=0, help="the step whose loss is NaN; 0 for none")
        parser.add_argument("--watched", action="store_true", help="with healthcheck's adapter for this trainer")
        parser.add_argument("--cpu", action="store_true")
        given = parser.parse_args()
        self.package, self.cpu = package, given.cpu
        self.count, self.nan_at, self.watched = given.steps, given.nan_at, given.watched
        self.device = torch.device("cpu" if given.cpu else "cuda:0")
        self.losses: list[float] = []
        self.stand_ins: list[str] = []
        self.exit_code = 0
        self.alerts: list[str] = []
        seed_all()
        if given.cpu:
            without_an_accelerator()
        for name, value in {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(random.SystemRandom().randrange(20000, 60000)),
        }.items():
            os.environ.setdefault(name, value)

    def loss(self, value: Any) -> None:
        """One step's loss. Reading it waits for the device, as a script that prints its loss does."""
        number = float(value)
        self.losses.append(number)
        print(f"step {len(self.losses)} loss {number.hex()}", flush=True)

    def given(self, what: str) -> None:
        """Something that the package expects and this machine lacks, given by the script."""
        self.stand_ins.append(what)

    def poisons(self, step: int) -> bool:
        return step == self.nan_at

    def end(self, models: Any) -> None:
        if not models:  # it broke before there was one; the error says why
            return
        finite = all(bool(p.detach().isfinite().all()) for model in models for p in model.parameters())
        last = {
            "steps": len(self.losses),
            "finite": finite,
            "parameters": sum(p.numel() for model in models for p in model.parameters()),
            "device": str(next(models[0].parameters()).device),
            "exit_code": self.exit_code,
            "alerts": self.alerts,
            "stand_ins": self.stand_ins,
            "version": version(self.package),
            "python": sys.version.split()[0],
            "torch": torch.__version__,
        }
        print("result " + json.dumps(last), flush=True)

    def judged(self, health: Any) -> None:
        """Alerts and exit code of an adapter."""
        self.alerts = [f"{alert.severity} {alert.rule}" for alert in health.alerts]
        self.exit_code = int(health.exit_code or 0)


def seed_all() -> None:
    random.seed(0)
    torch.manual_seed(0)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)


def batches(count: int, *, rows: int, length: int, vocabulary: int) -> list[torch.Tensor]:
    """Rows of tokens that can be learnt: each counts upward from a random start by a fixed stride."""
    made = torch.Generator().manual_seed(1)
    start = torch.randint(0, vocabulary, (count, rows, 1), generator=made)
    stride = torch.randint(1, 4, (count, rows, 1), generator=made)
    return list((start + stride * torch.arange(length + 1)) % vocabulary)


def without_an_accelerator() -> None:
    """For ``--cpu``: packages that ask for CUDA by name get the processor. A rehearsal of the code, not a result."""
    from contextlib import nullcontext
    from unittest.mock import MagicMock

    from torch.overrides import TorchFunctionMode

    def is_cuda(value: Any) -> bool:
        return isinstance(value, torch.device) and value.type == "cuda"

    class OnProcessor(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = dict(kwargs or {})
            if str(named.get("device")).startswith("cuda"):
                named["device"] = "cpu"
            moves = getattr(function, "__name__", "") == "_parse_to"  # of ``Module.to``, which takes a bare number too
            placed = [
                torch.device("cpu") if is_cuda(value) or (moves and type(value) is int) else value for value in args
            ]
            return function(*placed, **named)

    OnProcessor().__enter__()
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *given: None
    cuda.Stream = type("Stream", (MagicMock,), {})
    cuda.current_stream = cuda.default_stream = lambda *given, **named: MagicMock()
    cuda.reset_peak_memory_stats = lambda *given: None
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.max_memory_reserved = lambda *given: 0
    cuda.stream = lambda *given: nullcontext()
    torch.Tensor.cuda = lambda self, *given, **named: self  # type: ignore[method-assign, assignment]
