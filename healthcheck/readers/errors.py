"""What can go wrong while reading a recorded run."""

from __future__ import annotations

from pathlib import Path

from healthcheck.errors import UsageError


class UnreadableRunError(UsageError):
    """A recorded run cannot be read. The message names the file, the reason and the next step.

    ``replay`` reports it and goes on with the other runs.
    """

    slug = "unreadable-run"

    def __init__(self, path: Path, problem: str, advice: str = "") -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}" + (f"; {advice}" if advice else ""))
