"""A small real training state and the controls of a plain loop, for actions that act on them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from healthcheck.core.alerts import Alert, SeriesFact, Severity
from healthcheck.core.errors import UsageError
from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import ActionContext, Capabilities
from healthcheck.probes.memory_readings import TorchDevice

sys.path.insert(0, str(Path(__file__).parent))

ALL_CONTROLS = frozenset({"stop", "skip_update", "checkpoint", "scale_lr", "log"})


class View:
    """The model view of one module."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def named_parameters(self) -> list[tuple[str, Any]]:
        return list(self.model.named_parameters())

    def named_modules(self) -> list[tuple[str, Any]]:
        return list(self.model.named_modules())

    def optimizers(self) -> list[Any]:
        return [self.optimizer]


class LoopControls:
    """What a plain loop lets an action do, over a real model and optimizer."""

    def __init__(self, view: View, folder: Path, controls: frozenset[str] = ALL_CONTROLS, **gaps: str) -> None:
        self.capabilities = Capabilities("test loop", frozenset(EventKind), controls, gaps)
        self.device = TorchDevice()
        self.view, self.folder = view, folder
        self.stops: list[dict[str, Any]] = []
        self.skipped = False
        self.can_gate = True

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str, exit_code: int) -> None:
        self.stops.append({"reason": reason, "rule": rule, "step": step, "mode": mode, "exit_code": exit_code})

    def skip_update(self) -> bool:
        self.skipped = self.can_gate
        return self.can_gate

    def request_checkpoint(self, path: Path | None = None) -> str:
        if path is not None and path.exists():
            raise UsageError(f"{path} exists already; checkpoints are not overwritten")
        path = path or self.folder / "saved.pt"
        torch.save(self.view.model.state_dict(), path)
        return str(path)

    def scale_lr(self, factor: float) -> list[float]:
        for group in self.view.optimizer.param_groups:
            group["lr"] *= factor
        return [group["lr"] for group in self.view.optimizer.param_groups]

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise AssertionError("no action logs")


@pytest.fixture
def view() -> View:
    """A model with gradients, one of them with a NaN."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(5, 4)).sum().backward()
    assert model[0].weight.grad is not None
    model[0].weight.grad[0, 0] = float("nan")
    return View(model, optimizer)


@pytest.fixture
def controls(view: View, tmp_path: Path) -> LoopControls:
    return LoopControls(view, tmp_path)


@pytest.fixture
def make_controls(view: View, tmp_path: Path) -> Callable[..., LoopControls]:
    return lambda *args, **gaps: LoopControls(view, tmp_path, *args, **gaps)


@pytest.fixture
def alert() -> Alert:
    return Alert(
        rule="grads-not-finite",
        number=1,
        severity=Severity.ERROR,
        phase="train",
        episode=1,
        fired_step=131,
        detected_step=131,
        value=float("nan"),
        score=1.0,
        normal=None,
        threshold="non-finite",
        series=[SeriesFact("grad_norm", (), float("nan"), 1.0, None)],
        count=1,
        message="gradient norm is nan",
        hint="add an epsilon",
        facts={"first": "0.weight, 1 of 12 values"},
    )


@pytest.fixture
def context(view: View, controls: LoopControls, tmp_path: Path) -> Callable[..., ActionContext]:
    """``context(options, before_update=True, batch=..., run_dir=None)``."""
    values = {"grad_norm": [(s, 1.0 + s / 1000) for s in range(1, 132)], "loss": [(s, 2.0) for s in range(1, 131)]}

    def make(options: Mapping[str, Any] | None = None, *, batch: Any = None, **changes: Any) -> ActionContext:
        given: dict[str, Any] = {
            "controls": controls,
            "step": 131,
            "before_update": True,
            "run_dir": tmp_path / "run",
            "history": lambda name, n: values.get(name, [])[-n:],
            "series": lambda: list(values),
            "event": Event(EventKind.BEFORE_UPDATE, 131, model=view, optimizer=view.optimizer, batch=batch),
        }
        return ActionContext(options=options or {}, **{**given, **changes})

    return make
