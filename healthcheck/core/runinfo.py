"""What is known of a run: before it starts, and while it goes on. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class RunInfo:
    """What reports learn when a run starts."""

    target: str
    run_dir: Path | None = None
    rank: int = 0
    world_size: int = 1
    argv: list[str] = field(default_factory=list)
    resumed_from: int | None = None
    name: str = ""
    notes: list[str] = field(default_factory=list)
    """Sentences for the start block, each said once."""


@dataclass(slots=True)
class StateLoads:
    """Loads of a state dict that changed nothing. Trainers add to it; each step that ends hands on what it has."""

    unmatched: list[tuple[Any, str]] = field(default_factory=list)
    """Not one name fitted: a weak reference to the module, and words."""
    own: list[str] = field(default_factory=list)
    """It consisted of a module's own tensors, in words: at the end of the run, when it is said, the model may be gone."""

    def __bool__(self) -> bool:
        return bool(self.unmatched or self.own)


@dataclass(slots=True)
class RunFacts:
    """What a session knows of its run so far, for probes. One object for the whole run, in every event of it."""

    active_seconds: float = 0.0
    """Seconds of training up to this event; evaluations and test runs do not count."""
    own_seconds: float = 0.0
    """Seconds of host time that watching has taken, up to the event before this one."""
    actions_done: dict[str, int] = field(default_factory=dict)
    """Name of an action -> how often it has done something."""
    loads: StateLoads = field(default_factory=StateLoads)
