"""Paths and problems as a person at this terminal reads them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from healthcheck.errors import Problem


def shown(path: Path) -> str:
    """The path as a person in this directory would type it."""
    try:
        near = os.path.relpath(path)
    except ValueError:  # another drive
        return str(path)
    return str(path) if near.startswith("..") else near


def complaint(error: Exception) -> str:
    """All problems of a rule file with the source line and a caret; else the message."""
    problems: tuple[Problem, ...] = getattr(error, "problems", ())
    if not problems:
        return str(error)
    from healthcheck.rulelang.problems import render_text

    return render_text(problems)
