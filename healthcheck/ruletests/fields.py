"""Reading the values of a rule-test file: one problem per mistake, with its place, and never an exception."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from healthcheck.dispatch import suggest
from healthcheck.errors import Problem
from healthcheck.rulelang.document import Document, KeyPath
from healthcheck.rulelang.quantities import QuantityError, parse_duration, shorten

TEST_KEYS = (
    "name",
    "series",
    "ranks",
    "expect",
    "only",
    "off",
    "set",
    "warmup",
    "profile",
    "step_time",
    "continue_after_stop",
    "resume_at",
    "xfail",
)
EXPECT_KEYS = (
    "rule",
    "fires",
    "clears",
    "then",
    "series",
    "count",
    "severity",
    "message",
    "rank",
    "explained_by",
)

SYNONYMS = {
    "rule_files": "rules",
    "input_series": "series",
    "record": "series",
    "interval": "step_time",
    "alerts": "expect",
    "expected": "expect",
    "description": "name",
    "title": "name",
    "skip": "xfail",
    "alert": "rule",
    "id": "rule",
    "at": "fires",
    "step": "fires",
    "steps": "fires",
    "actions": "then",
    "level": "severity",
    "resume": "resume_at",
}
"""Words of other tools -> ours."""


class Fields:
    """One document; collects problems instead of raising."""

    def __init__(self, document: Document, path: Path) -> None:
        self.document = document
        self.path = path
        self.problems: list[Problem] = list(document.problems)

    def bad(
        self, where: KeyPath, message: str, suggestion: str = "", *, slug: str = "value", key: bool = False
    ) -> None:
        self.problems.append(self.document.problem(where, slug, message, key=key, suggestion=suggestion))

    def known_keys(self, where: KeyPath, data: dict[str, Any], known: tuple[str, ...]) -> None:
        for key in data:
            if key not in known:
                hint = _hint(key, known) or f"known: {', '.join(known)}"
                self.bad((*where, key), f'unknown key "{shorten(key)}"', hint, slug="unknown-key", key=True)

    def lacks(self, data: dict[str, Any], wanted: str, known: tuple[str, ...]) -> bool:
        """Whether a key is missing, and not only misspelt: that is said already, as an unknown key."""
        return wanted not in data and all(f'"{wanted}"' not in _hint(key, known) for key in data if key not in known)

    def value(self, where: KeyPath, data: dict[str, Any], key: str, kind: type, wanted: str, default: Any) -> Any:
        found = data.get(key, default)
        if key in data and not isinstance(found, kind):
            self.bad((*where, key), f"`{key}` is {wanted}, found {shown(found)}")
            return default
        return found

    def whole(self, where: KeyPath, data: dict[str, Any], key: str, default: int | None) -> int | None:
        found = data.get(key, default)
        if key in data and (isinstance(found, bool) or not isinstance(found, int) or found < 0):
            self.bad((*where, key), f"`{key}` is a whole number, found {shown(found)}")
            return default
        return found

    def steps(self, where: KeyPath, given: Any) -> tuple[int, ...] | None:
        if given is None:
            return None
        listed = given if isinstance(given, list) else [given]
        if not listed or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in listed):
            self.bad(where, f"`{where[-1]}` is a step or a list of steps, counted from 1; found {shown(given)}")
            return None
        return tuple(listed)

    def words(self, where: KeyPath, data: dict[str, Any], key: str, wanted: str) -> tuple[str, ...]:
        given = data.get(key, [])
        listed = given if isinstance(given, list) else [given]
        if any(not isinstance(word, str) for word in listed):
            self.bad((*where, key), f"`{key}` is a list of {wanted}, found {shown(given)}")
            return ()
        return tuple(listed)

    def duration(self, where: KeyPath, data: dict[str, Any], key: str, default: float) -> float:
        if key not in data:
            return default
        return self._try((*where, key), lambda: parse_duration(data[key]), default)

    def _try(self, where: KeyPath, read: Callable[[], float], default: float) -> float:
        try:
            return read()
        except QuantityError as error:
            self.bad(where, str(error))
            return default


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    return f'"{shorten(str(value))}"' if isinstance(value, str) else str(value).lower()


def _hint(key: str, known: tuple[str, ...]) -> str:
    word = SYNONYMS.get(key, "")
    return f'here it is called "{word}"' if word in known else suggest(key, known)
