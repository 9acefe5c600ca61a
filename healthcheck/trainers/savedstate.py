"""Detector state beside a checkpoint, and the torch optimizer inside a framework's wrappers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from healthcheck.errors import HealthCheckError

if TYPE_CHECKING:
    from healthcheck.session import Session

STATE_FILE = "healthcheck-state.json"
"""Detector state beside a checkpoint."""


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
            state = json.load(file)
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def resume(session: Session, step: int, state: Mapping[str, Any] | None) -> None:
    """A run goes on after ``step`` updates; ``state`` is what was kept with its checkpoint, if it is there."""
    session.info.resumed_from = session.step = step
    if state is None:
        start_fresh(session, step)
        session.note(f"resumed after step {step:,} without detector state: rules start fresh")
        return
    try:
        fresh = session.load_state_dict(state)
    except (HealthCheckError, KeyError, TypeError, ValueError) as error:
        start_fresh(session, step)
        session.note(f"resumed after step {step:,}; the saved detector state cannot be used: {error}")
        return
    session.step = step
    if int(state.get("step", step)) != step:
        session.engine.rewind(step)
    for sentence in fresh:
        session.note(sentence)


def start_fresh(session: Session, step: int) -> None:
    """Rules that begin to look in the middle of a run: their warm-up begins there too."""
    session.engine.step = step
    for state in session.engine.states:
        state.start_step = step


def _state_path(folder: str | os.PathLike[str], rank: int) -> str:
    name = STATE_FILE if rank == 0 else STATE_FILE.replace(".json", f"-rank{rank}.json")
    return os.path.join(os.fspath(folder), name)
