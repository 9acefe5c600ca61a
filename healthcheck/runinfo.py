"""What is known of a run before it starts. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


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
