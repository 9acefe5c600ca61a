"""Detector state beside a checkpoint, and the torch optimizer inside a framework's wrappers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import HealthCheckError, UsageError
from healthcheck.extend.guard import describe

if TYPE_CHECKING:
    from healthcheck.run.session import Session


STATE_FILE = "healthcheck-state.json"
"""Detector state beside a checkpoint."""


def new_checkpoint(session: Session, path: Path | None, name: str, otherwise: Path | None = None) -> Path:
    """Where a checkpoint that an action asked for goes: ``path``, or ``name`` in the run's folder.

    :param otherwise: folder for a run that has none.

    Raises ``UsageError`` for a place that is taken, and where there is none. Several ranks save at one place, which
    the first of them may have begun already; they looked before they agreed on it.
    """
    if path is None:
        folder = session.info.run_dir or otherwise
        if folder is None:
            raise UsageError("this run has no folder; give the action a path")
        path = folder / "checkpoints" / name
    if session.info.world_size < 2 and path.exists():
        raise UsageError(f"{path} exists already")
    return path


def inner_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside a framework's wrappers."""
    for _ in range(4):
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "_optimizer", None)
        if inner is None or not hasattr(inner, "param_groups"):
            break
        optimizer = inner
    return optimizer


def write_state(folder: str | os.PathLike[str], state: Mapping[str, Any], rank: int = 0) -> None:
    """Write detector state into a checkpoint folder, whole or not at all. Rank 0 has the plain name."""
    path = _state_path(folder, rank)
    unfinished = f"{path}.part"
    with open(unfinished, "w", encoding="utf-8") as file:
        json.dump(state, file)
    os.replace(unfinished, path)


def read_state(folder: str | os.PathLike[str] | None, rank: int = 0) -> dict[str, Any] | None:
    """Detector state of a checkpoint folder, or None if there is none that can be read."""
    if folder is None:
        return None
    try:
        with open(_state_path(folder, rank), encoding="utf-8") as file:
            return parse_state(file.read())
    except (OSError, ValueError):
        return None


def parse_state(text: Any) -> dict[str, Any] | None:
    """The text of a saved state, or None if it is none."""
    try:
        state = json.loads(text)
    except (TypeError, ValueError):
        return None
    return state if isinstance(state, dict) and isinstance(state.get("step"), int) else None


def resume(session: Session, step: int, state: Mapping[str, Any] | None) -> None:
    """A run goes on after ``step`` updates; ``state`` is what was kept with its checkpoint, if it is there."""
    session.info.resumed_from = session.step = step
    if state is None:
        start_fresh(session, step)
        session.note(f"resumed after step {step:,} without detector state: rules start fresh")
        return
    fresh, why = restore(session, step, state)
    if why:
        session.note(f"resumed after step {step:,}; the saved detector state cannot be used: {why}")
        return
    session.step = step
    if int(state.get("step", step)) != step:
        session.engine.rewind(step)
    for sentence in fresh:
        session.note(sentence)


def restore(session: Session, step: int, state: Mapping[str, Any]) -> tuple[list[str], str]:
    """Give detectors back what they knew: ``(a sentence for each rule that starts fresh, why nothing could be used)``.

    A state of which nothing can be read leaves all rules fresh after ``step``.
    """
    try:
        return session.load_state_dict(state), ""
    except Exception as error:  # a file that somebody edited, or of another version: it must not end the training
        start_fresh(session, step)
        return [], str(error) if isinstance(error, HealthCheckError) else describe(error)


def start_fresh(session: Session, step: int) -> None:
    """Rules that begin to look in the middle of a run: their warm-up begins there too."""
    session.engine.step = step
    for state in session.engine.states:
        state.start_fresh(step)


def _state_path(folder: str | os.PathLike[str], rank: int) -> str:
    name = STATE_FILE if rank == 0 else STATE_FILE.replace(".json", f"-rank{rank}.json")
    return os.path.join(os.fspath(folder), name)
