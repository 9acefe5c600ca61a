"""Whether a model is still the one that a probe looked at, without keeping it alive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from healthcheck.references import weak


class SeenModules:
    """Recognises a list of named modules by its length, its first and its last module.

    A view may build a new list at every call, so the list itself says nothing.
    """

    def __init__(self) -> None:
        self._count = -1
        self._ends: tuple[Callable[[], Any], Callable[[], Any]] | None = None

    def changed(self, modules: Sequence[tuple[str, Any]]) -> bool:
        """True at the first look and after the model was replaced; notes the new one."""
        if len(modules) == self._count:
            if self._ends is None:
                return False
            first, last = self._ends
            if first() is modules[0][1] and last() is modules[-1][1]:
                return False
        self._count = len(modules)
        self._ends = (weak(modules[0][1]), weak(modules[-1][1])) if modules else None
        return True

    def forget(self) -> None:
        """The next look finds everything new."""
        self._count, self._ends = -1, None
