"""The value of ``metric:``: ``loss``, ``grad_norm[*]``, ``time.step[rank=*]``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from healthcheck.rulelang.quantities import shorten
from healthcheck.rulelang.rule import Selector

MAX_LENGTH = 300
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./:-]*")
_LABEL = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*?)\s*", re.DOTALL)


class SelectorError(ValueError):
    """A metric cannot be read; ``column`` counts characters from 0."""

    def __init__(self, message: str, column: int = 0, *, suggestion: str = "") -> None:
        super().__init__(message)
        self.column = column
        self.suggestion = suggestion


def parse_selector(text: str, excluded: Sequence[str] = ()) -> Selector:
    """Raises ``SelectorError``: no name, a bracket that is not closed, an empty glob."""
    if len(text) > MAX_LENGTH:
        raise SelectorError(f"a metric has at most {MAX_LENGTH} characters")
    name, bracket, rest = text.strip().partition("[")
    if not _NAME.fullmatch(name):
        if any(c in name for c in "*?"):
            raise SelectorError(
                "a glob stands in brackets, after the name of the family", suggestion="write for instance grad_norm[*]"
            )
        if any(c in name for c in "+(<>=") or " " in name.strip():
            raise SelectorError(
                f'"{shorten(name)}" is not the name of a metric',
                suggestion="give a formula a name in the `metrics:` block",
            )
        raise SelectorError(f'"{shorten(text)}" is not the name of a metric')
    if not bracket:
        if excluded:
            raise SelectorError(f"`except` only makes sense for a family; write {name}[*]")
        return Selector(name)
    if not rest.endswith("]"):
        raise SelectorError("the bracket is never closed", len(name))
    inner = rest[:-1]
    globs: list[tuple[str, str]] = []
    for part in _split(inner):
        labelled = _LABEL.fullmatch(part)
        label, glob = (labelled[1], labelled[2]) if labelled else ("", part.strip())
        if not glob:
            raise SelectorError("an empty glob matches nothing; write `*` for all", len(name) + 1)
        if any(label == known for known, _ in globs):
            raise SelectorError(
                f'the label "{label}" is given twice' if label else "one glob for the family is enough", len(name) + 1
            )
        globs.append((label, glob))
    return Selector(name, tuple(globs), tuple(excluded))


def _split(inner: str) -> Iterable[str]:
    """At commas outside of ``[...]`` character classes."""
    depth, start = 0, 0
    for at, character in enumerate(inner):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth <= 0:
            yield inner[start:at]
            start = at + 1
    yield inner[start:]
