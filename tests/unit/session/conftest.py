"""A session with rules from text and controls that only remember what was asked of them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from healthcheck.assembly import open_session
from healthcheck.core.clock import VirtualClock
from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Capabilities
from healthcheck.run.session import Session


class RecordingControls:
    """Stands in for a trainer: the real ones are tested in tests/trainers."""

    device: Any = None

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.capabilities = Capabilities("test", frozenset(EventKind), frozenset({"stop", "skip_update"}))

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str = "graceful", exit_code: int = 1) -> None:
        self.asked.append(f"stop by {rule or 'user'} at {step}")

    def skip_update(self) -> bool:
        self.asked.append("skip")
        return True

    def request_checkpoint(self, path: Path | None = None) -> str:
        return "somewhere"

    def scale_lr(self, factor: float) -> list[float]:
        return []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.asked.append("log")


class Run:
    def __init__(self, session: Session) -> None:
        self.session = session
        self.controls = RecordingControls()
        session.bind(self.controls)

    def step(self, step: int, loss: float = 1.0, **metrics: Any) -> None:
        emit = self.session.emit
        emit(Event(EventKind.LOSS, step, loss=loss))
        if metrics:
            self.session.log(metrics, step=step)
        emit(Event(EventKind.BEFORE_UPDATE, step))
        emit(Event(EventKind.STEP_END, step))


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def make(rules: str, **options: Any) -> Run:
        text = "version: 1\n" + textwrap.dedent(rules)
        return Run(open_session(target="test", rules=[text], console=False, clock=VirtualClock(), **options))

    return make
