"""From PyYAML's flat event stream to plain values with marks: no recursion, bounded, YAML 1.2 scalars."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from healthcheck.errors import Problem
from healthcheck.rulelang.document import Document, Mark
from healthcheck.rulelang.quantities import shorten

MAX_NODES = 200_000
MAX_DEPTH = 40
MAX_SECONDS = 5.0
"""CPU time, not wall time: a stalled file system must not turn a good file into a bad one."""
LOOK_AT_CLOCK = 64
"""Containers between two looks: where asking for CPU time is a system call, a look costs as much as the container."""
MAX_NUMBER_DIGITS = 100

_INT = re.compile(r"[-+]?[0-9]+")

_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")

_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")

_CONSTANTS: dict[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}


class _Stop(Exception):
    """Parsing cannot go on; the problem is recorded."""


@dataclass(slots=True)
class _Frame:
    value: Any
    mark: Mark
    anchor: str | None
    key: str | None = None
    key_mark: Mark | None = None
    expects_key: bool = True
    skip: bool = False
    """The value to come belongs to a key that was refused."""


class TreeBuilder:
    """Builds values and marks from parser events, without recursion."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.stack: list[_Frame] = []
        self.anchors: dict[str, tuple[Any, Mark]] = {}
        self.nodes = 0
        self.documents = 0
        self.containers = 0
        self.deadline = time.process_time() + MAX_SECONDS

    def build(self, events: Iterator[Any]) -> None:
        try:
            for event in events:
                self._take(event)
        except _Stop:
            self.document.data = None

    def _take(self, event: Any) -> None:
        kind = type(event).__name__
        if kind == "ScalarEvent":
            self._no_tag(event)
            mark = self._mark(event)
            value = event.value
            quoted = event.style in ("'", '"', "|", ">")
            mark.quoted = event.style in ("'", '"')
            if self.stack and self.stack[-1].expects_key and isinstance(self.stack[-1].value, dict):
                self._key(value, mark, quoted)
                return
            self._value(value if quoted else self._scalar(value, mark), mark, event.anchor)
        elif kind in ("MappingStartEvent", "SequenceStartEvent"):
            self._no_tag(event)
            self._not_a_key(event)
            if len(self.stack) >= MAX_DEPTH:
                self._stop(event, "too-deep", f"nested more than {MAX_DEPTH} levels deep")
            value = {} if kind == "MappingStartEvent" else []
            mark = self._mark(event)
            mark.width = 0 if event.flow_style is False else 1
            self.stack.append(_Frame(value, mark, event.anchor))
            self._count(event, 1)
        elif kind in ("MappingEndEvent", "SequenceEndEvent"):
            frame = self.stack.pop()
            self._value(frame.value, frame.mark, frame.anchor, counted=True)
        elif kind == "AliasEvent":
            self._not_a_key(event)
            known = self.anchors.get(event.anchor)
            if known is None:
                hint = "an anchor cannot contain itself" if any(f.anchor == event.anchor for f in self.stack) else ""
                self._stop(
                    event,
                    "undefined-alias",
                    hint or f"`*{shorten(event.anchor)}` refers to an anchor that does not exist",
                    suggestion="" if hint else "quote a value that starts with `*`",
                )
            assert known is not None
            value, target = known
            self._count(event, target.nodes)
            mark = self._mark(event)
            mark.children, mark.keys, mark.nodes = target.children, target.keys, target.nodes
            self._value(value, mark, None, counted=True)
        elif kind == "DocumentStartEvent":
            self.documents += 1
            if self.documents > 1:
                self._stop(event, "several-documents", "a second YAML document begins here (`---`); use one file each")

    def _scalar(self, text: str, mark: Mark) -> Any:
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if len(text) > MAX_NUMBER_DIGITS:
            return text
        if _INT.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
        if _BASED.fullmatch(text):
            return int(text, 0)
        return text

    def _key(self, text: str, mark: Mark, quoted: bool) -> None:
        frame = self.stack[-1]
        frame.key, frame.key_mark, frame.expects_key = text, mark, False
        frame.skip = False
        if text == "<<" and not quoted:
            self._add(
                mark, "merge-key", "merge keys (`<<`) are not part of rule files", "use `defaults:` or `extends:`"
            )
            frame.skip = True
        elif text in frame.value:
            first = frame.mark.keys[text].line
            self._add(mark, "duplicate-key", f'duplicate key "{shorten(text)}" (first at line {first})', "")
            frame.skip = True

    def _value(self, value: Any, mark: Mark, anchor: str | None, *, counted: bool = False) -> None:
        if not counted:
            self.nodes += 1
            if self.nodes > MAX_NODES:
                self._stop_at(mark, "too-many-values", f"more than {MAX_NODES:,} values")
        if anchor is not None:
            self.anchors[anchor] = (value, mark)
        if not self.stack:
            self.document.data, self.document.root = value, mark
            return
        frame = self.stack[-1]
        frame.mark.nodes += mark.nodes
        if isinstance(frame.value, list):
            frame.mark.children[len(frame.value)] = mark
            frame.value.append(value)
            return
        assert frame.key is not None and frame.key_mark is not None
        if not frame.skip:
            frame.value[frame.key] = value
            frame.mark.children[frame.key] = mark
            frame.mark.keys[frame.key] = frame.key_mark
        frame.expects_key = True

    def _mark(self, event: Any) -> Mark:
        start, end = event.start_mark, event.end_mark
        width = end.column - start.column if end.line == start.line else 1
        return Mark(start.line + 1, start.column + 1, max(1, width))

    def _count(self, event: Any, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > MAX_NODES:
            self._stop(event, "too-many-values", f"more than {MAX_NODES:,} values once all aliases are expanded")
        self.containers += 1
        if self.containers % LOOK_AT_CLOCK == 0 and time.process_time() > self.deadline:
            self._stop(event, "too-slow", f"reading took longer than {MAX_SECONDS:g} s")

    def _no_tag(self, event: Any) -> None:
        if event.tag is not None and event.tag != "!":
            shown = event.tag.replace("tag:yaml.org,2002:", "!!")
            self._stop(
                event,
                "tag",
                f"YAML tags such as `{shorten(shown)}` are not allowed",
                suggestion="quote a value that starts with `!`",
            )

    def _not_a_key(self, event: Any) -> None:
        frame = self.stack[-1] if self.stack else None
        if frame is not None and isinstance(frame.value, dict) and frame.expects_key:
            self._stop(
                event,
                "key-not-text",
                "a key must be plain text",
                suggestion='in braces, quote values with brackets: "grad_norm[...]"',
            )

    def _add(self, mark: Mark, slug: str, message: str, suggestion: str) -> None:
        self.document.problems.append(problem_at(self.document, mark, slug, message, suggestion))

    def _stop(self, event: Any, slug: str, message: str, *, suggestion: str = "") -> None:
        self._add(self._mark(event), slug, message, suggestion)
        raise _Stop

    def _stop_at(self, mark: Mark, slug: str, message: str) -> None:
        self._add(mark, slug, message, "")
        raise _Stop


def problem_at(document: Document, mark: Mark, slug: str, message: str, suggestion: str = "") -> Problem:
    source = document.lines[mark.line - 1] if 0 < mark.line <= len(document.lines) else ""
    return Problem(document.path, mark.line, mark.column, slug, message, "error", suggestion, source, mark.width or 1)
