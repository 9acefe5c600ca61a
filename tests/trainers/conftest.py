"""Scripts played under a session in this process: fast, and it shows that everything is restored."""

from __future__ import annotations

import gc
import json
import os
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


# --------------------------------------------------------------------------------------------------
# What the suite has found of each trainer, for docs/reference/capabilities.md: with HEALTHCHECK_UPDATE_ZOO=1, without workers.

RESULTS = Path(__file__).parents[2] / "docs" / "_trainers.json"
_FAULTS = {
    "nan_loss": "nan",
    "nan_gradient": "nan",
    "loss_spike": "spike",
    "memory_growth": "leak",
    "overfit": "evaluation",
}
_TESTS = {
    "test_a_stop_before_the_update_leaves_finite_weights": "stop",
    "test_a_stop_ends_the_run_in_order_at_its_step": "stop",
    "test_a_resume_neither_loses_nor_repeats_an_alert": "resume",
}
_RESUMES = {
    (
        "test_resume_script",
        "test_a_resumed_run_neither_loses_nor_repeats_an_alert_and_ends_as_the_unbroken_one",
    ): "script",
    ("test_megatron_bridge", "test_a_resume_goes_on_with_the_numbers_and_the_detectors"): "megatron_bridge",
    ("test_automodel", "test_checkpoints_carry_the_detectors_and_a_resume_goes_on"): "automodel",
    ("test_torchtitan", "test_checkpoints_carry_the_detectors_and_a_resume_goes_on"): "torchtitan",
    ("test_dream", "test_detectors_survive_in_the_trainer_s_own_checkpoint"): "dream",
}


def _cell(item: Any) -> tuple[str, str] | None:
    """The trainer and the column for which a test speaks."""
    name, given = item.originalname, item.callspec.params if hasattr(item, "callspec") else {}
    if name == "test_the_fault_is_found_by_its_rule_at_its_step" and given["fault"] in _FAULTS:
        return given["trainer"], _FAULTS[given["fault"]]
    if name in _TESTS and "trainer" in given:
        return given["trainer"], _TESTS[name]
    trainer = _RESUMES.get((item.module.__name__.rpartition(".")[2], name))
    return None if trainer is None else (trainer, "resume")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    report: Any = yield
    cell = _cell(item) if os.environ.get("HEALTHCHECK_UPDATE_ZOO") == "1" else None
    if cell is not None and (report.when == "call" or not report.passed):
        said = "works" if report.passed else "fails"
        if report.skipped:
            said = f"not run: {str(report.longrepr[2]).removeprefix('Skipped: ')}"
        gap = dict(item.user_properties).get("gap")
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        fresh = item.config.stash.setdefault(_SEEN, set())
        of_trainer = known.setdefault(cell[0], {})
        if cell not in fresh or of_trainer[cell[1]] == "works":  # of several tests for one cell the worst is told
            of_trainer[cell[1]] = f"cannot: {gap}" if gap else said
        fresh.add(cell)
        RESULTS.write_text(
            json.dumps({name: dict(sorted(known[name].items())) for name in sorted(known)}, indent=1) + "\n"
        )
    return report


_SEEN: pytest.StashKey[set[tuple[str, str]]] = pytest.StashKey()
