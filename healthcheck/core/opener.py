"""How modules below the composition root open a session without importing it. Standard library only.

A callback that a user constructs, or ``healthcheck.watch``, needs a session, and only :mod:`healthcheck.assembly`
can put one together. Importing the package hands its opener over here.
"""

from __future__ import annotations

from typing import Any


def open_session(options: Any) -> Any:
    """Open a :class:`healthcheck.Session` for one run; ``options`` are :class:`~healthcheck.run.opening.SessionOptions`.

    Raises ``UsageError`` (``RuleFileError`` with all mistakes) before anything is run.
    """
    raise RuntimeError("importing the package `healthcheck` puts its opener here")
