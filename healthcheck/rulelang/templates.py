"""Messages with placeholders, checked when the file is read. Never ``str.format``.

``str.format`` reaches attributes and from there module globals; here a placeholder is one of a
closed set of names with at most a numeric format, and rendering cannot raise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from healthcheck.core.redact import redact_text
from healthcheck.core.text import in_message, size_text
from healthcheck.extend.dispatch import nearest
from healthcheck.rulelang.quantities import shorten

PLACEHOLDERS: dict[str, str] = {
    "value": "the sample that breached",
    "score": "the score that the condition gave it",
    "normal": "what it was compared with: median, mean, best, ...",
    "threshold": "the comparator in words: above 8",
    "window": "how many samples the condition looks back",
    "step": "step of the sample",
    "epoch": "epoch, where the trainer knows one",
    "rule": "id of the rule",
    "series": "name of the worst series",
    "rank": "rank that saw it",
    "count": "how many series breached",
}
UNKNOWN = "?"
"""What a placeholder without a value becomes."""
MAX_LENGTH = 500

_PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_FORMAT = re.compile(r"B|[<>^]?[-+ ]?\d{0,2},?(?:\.\d{1,2})?[eEfFgGd%]?")
"""Python's numeric formats, and ``B`` for bytes as people write them: ``812 MiB``."""
_WHOLE = ("step", "rank", "count", "window")


class TemplateError(ValueError):
    """A message template cannot be used; ``column`` counts characters from 0."""

    def __init__(self, message: str, column: int, width: int, *, suggestion: str = "") -> None:
        super().__init__(message)
        self.column = column
        self.width = width
        self.suggestion = suggestion


class Template:
    """A compiled message: call it with a mapping of placeholders."""

    __slots__ = ("_pieces", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces: list[str | tuple[str, str]] = _compile(text)

    def __call__(self, values: Mapping[str, Any]) -> str:
        return "".join(p if isinstance(p, str) else _render(p[0], p[1], values.get(p[0])) for p in self._pieces)


def _compile(text: str) -> list[str | tuple[str, str]]:
    if len(text) > MAX_LENGTH:
        raise TemplateError(f"the message has {len(text)} characters; at most {MAX_LENGTH}", 0, 1)
    pieces: list[str | tuple[str, str]] = []
    at = 0
    for found in _PIECE.finditer(text):
        pieces.append(text[at : found.start()])
        at = found.end()
        whole, inner = found[0], found[1]
        if whole in ("{{", "}}"):
            pieces.append(whole[0])
        elif inner is None:
            raise TemplateError(
                f"a lone `{whole}` in the message",
                found.start(),
                1,
                suggestion=f"write `{whole}{whole}` for the character",
            )
        else:
            pieces.append(_placeholder(inner, found.start(), len(whole)))
    pieces.append(text[at:])
    return [redact_text(p) if isinstance(p, str) else p for p in pieces if p]


def without_secrets(text: str) -> str:
    """Words of a rule file, for the record and the reports that others read; placeholders stay."""
    parts, at = [], 0
    for found in _PIECE.finditer(text):
        parts += [redact_text(text[at : found.start()]), found[0]]
        at = found.end()
    return "".join([*parts, redact_text(text[at:])])


def _placeholder(inner: str, column: int, width: int) -> tuple[str, str]:
    name, colon, spec = inner.partition(":")
    if name not in PLACEHOLDERS:
        near = nearest(name, PLACEHOLDERS)
        raise TemplateError(
            f"unknown placeholder {{{shorten(name)}}}",
            column,
            width,
            suggestion=f"did you mean `{{{near}}}`?" if near else f"there are {', '.join(PLACEHOLDERS)}",
        )
    if colon and not _FORMAT.fullmatch(spec):
        raise TemplateError(
            f'"{shorten(spec)}" is not a numeric format',
            column,
            width,
            suggestion="write for instance {value:.4g} or {score:.1f}",
        )
    return name, spec


def _render(name: str, spec: str, value: Any) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return shorten(str(value), 200)
    if not spec:
        return in_message(value, whole=name in _WHOLE)
    try:
        if spec == "B":
            return size_text(value)
        if spec[-1] == "d":
            return format(round(value), spec)
        if isinstance(value, int) and "." not in spec and not spec[-1].isalpha() and spec[-1] != "%":
            return format(value, spec)
        return format(float(value), spec)
    except (ValueError, OverflowError, TypeError):
        return in_message(value)


def default_message(sentence: str, *, judges_nonfinite: bool) -> Callable[[Mapping[str, Any]], str]:
    """The sentence of a rule that has no ``message``: the condition's own.

    A value that is not a number has no score, so then it only says that.
    """
    usual, plain = Template(sentence), Template("{series} is {value}")
    if judges_nonfinite:
        return usual

    def render(values: Mapping[str, Any]) -> str:
        value = values.get("value")
        broken = isinstance(value, float) and not math.isfinite(value)
        return (plain if broken else usual)(values)

    return render
