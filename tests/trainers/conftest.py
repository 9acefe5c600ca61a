"""Scripts played under a session in this process: fast, and it shows that everything is restored."""

from __future__ import annotations

import gc
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from healthcheck.assembly import open_session
from healthcheck.core.events import Event, EventKind
from healthcheck.core.samples import Sample, series_name
from healthcheck.instrument.script import ScriptTrainer
from healthcheck.run import current
from healthcheck.run.session import Session

NOTHING = {"version": 1, "rules": {}}


@dataclass
class Played:
    """What one script showed."""

    session: Session
    code: int
    events: list[Event] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    """Values of every series that reached the engine, in order."""
    left: list[int] = field(default_factory=list)
    """Exit codes with which the process would have been ended by force."""

    def of(self, kind: str) -> list[Event]:
        return [e for e in self.events if e.kind.value == kind]

    def kinds(self, step: int | None = None) -> list[str]:
        return [e.kind.value for e in self.events if step is None or e.step == step]

    def steps(self, kind: str = "step_end") -> list[int]:
        return [e.step for e in self.of(kind)]


class ForcedEnd(BaseException):
    """Stands for os._exit."""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write a script; returns its path."""

    def write(text: str, name: str = "train.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No test leaves a session that watches the process."""
    yield
    assert current.current() is None, "a test left a session open"


@pytest.fixture(scope="session", autouse=True)
def of_these_tests(compiler_imported: None) -> None:
    """Scripts are played in this process."""


@pytest.fixture
def play(script: Callable[[str], Path]) -> Callable[..., Played]:
    """``play(text, rules=..., on={"step_end": fn})``: run a script, keep every event, values read at once."""

    def run(
        text: str,
        *argv: str,
        rules: Any = None,
        settings: dict[str, Any] | None = None,
        on: dict[str, Callable[[Session, Event], None]] | None = None,
        listen: bool = True,
    ) -> Played:
        gc.collect()  # models of the test before are no part of this script
        session = open_session(
            target="train.py", rules=rules or NOTHING, settings=settings or {}, console=False, record=False
        )
        played = Played(session, -1)
        for kind in EventKind if listen else ():
            session.on(kind, lambda event: played.events.append(_read(event)))
        if listen:
            session.on("samples", lambda samples: _keep(played.samples, samples))
        for name, function in (on or {}).items():
            session.on(name, lambda event, function=function: function(session, event))

        def leave(code: int) -> None:
            played.left.append(code)
            raise ForcedEnd

        try:
            played.code = ScriptTrainer(session, leave=leave).run(str(script(text)), list(argv))
        except ForcedEnd:
            pass
        assert session.internal_errors == []
        return played

    return run


def _keep(kept: dict[str, list[float]], samples: Sequence[Sample]) -> None:
    for sample in samples:
        kept.setdefault(series_name(sample.metric, sample.labels), []).append(sample.value)


def _read(event: Event) -> Event:
    for name in ("loss", "grad_norm", "loss_scale"):
        value = getattr(event, name)
        if hasattr(value, "item"):
            setattr(event, name, value.item())
    return event
