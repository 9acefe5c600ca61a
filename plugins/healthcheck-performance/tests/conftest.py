"""A small training, watched in this process, and scripts in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import healthcheck

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = "healthcheck_performance"
NO_RULES: dict[str, Any] = {"version": 1, "rules": {}}


class Planted(nn.Module):
    """Slow on purpose."""

    def forward(self, x: Any) -> Any:
        return x + torch.sort(torch.rand(100_000))[0][:1]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), Planted())
        self.head = nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        return self.head(self.encoder(x))


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``train(rules, callbacks=[...], steps=20)``: watch the training of a model; returns session, report, model and notes."""
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def run(
        rules: Any = None,
        *,
        callbacks: Sequence[Any] = (),
        steps: int = 20,
        model: Any = None,
        size: Callable[[int], int] = lambda step: 4,
        width: int = 8,
        record: bool = True,
        called: Any = None,
        between: Callable[[int, Any], None] = lambda step, session: None,
    ) -> Any:
        torch.manual_seed(0)
        model = Net() if model is None else model
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        notes: list[str] = []
        options: dict[str, Any] = {
            "plugins": [PLUGIN],
            "console": False,
            "record": record,
            "callbacks": list(callbacks),
        }
        with healthcheck.watch(model, optimizer, rules=rules or NO_RULES, **options) as health:
            session = health.session
            session.on("train_start", lambda event: None)
            session.add_report(SimpleNamespace(name="notes", note=notes.append))
            for step in range(1, steps + 1):
                between(step, session)
                loss = (model if called is None else called)(torch.randn(size(step), width)).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                health.step(loss=loss)
        return SimpleNamespace(session=session, report=session.report, model=model, notes=notes)

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``script("healthcheck", "run", ...)`` in an empty folder with our plugin on the path."""

    def run(*command: str, environment: dict[str, str] | None = None, timeout: float = 240) -> Any:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        given = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        given |= {"HEALTHCHECK_RUNS": str(tmp_path / "runs"), **(environment or {})}
        words = [sys.executable, "-m", *command] if command[0] == "healthcheck" else [sys.executable, *command]
        return subprocess.run(
            words,
            cwd=tmp_path,
            env=given,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    return run
