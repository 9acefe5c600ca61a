"""YAML -> plain Python values with a line and column for every key and value. Safe by construction.

Not ``yaml.safe_load``: under YAML 1.1 ``1e-3`` is a string, ``off`` and ``no`` are booleans, ``010``
is eight, and a duplicate key silently wins. Here scalars follow the core schema of YAML 1.2, as
editors do; keys are always text; duplicate keys, tags, merge keys and several documents are
refused; and size, number of nodes, depth, alias expansion and time are bounded. The tree is built
from PyYAML's flat event stream, so that deep nesting cannot exhaust the stack.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from healthcheck.errors import Problem
from healthcheck.rulelang.quantities import shorten

MAX_BYTES = 1 << 20
MAX_NODES = 200_000
MAX_DEPTH = 40
MAX_SECONDS = 5.0
MAX_NUMBER_DIGITS = 100

KeyPath = tuple["str | int", ...]

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


@dataclass(slots=True)
class Mark:
    """Where a value stands, and its children. Line and column count from 1."""

    line: int
    column: int
    width: int
    quoted: bool = False
    children: dict[str | int, Mark] = field(default_factory=dict)
    keys: dict[str | int, Mark] = field(default_factory=dict)
    nodes: int = 1
    """Values in it, aliases counted as often as they are used."""


@dataclass(slots=True)
class Document:
    """One rule file, pack or dict: its content, and the place of everything in it."""

    path: str
    """As shown to people: a file name, a pack name, or ``rules`` for a dict."""
    data: Any = None
    root: Mark | None = None
    lines: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    folder: FilePath | None = None
    """Where relative names in ``extends`` start."""
    own: bool = True
    """False for packs: their keys give way to a profile's defaults."""

    def mark(self, where: KeyPath, *, key: bool = False) -> Mark | None:
        """The place of a value, or with ``key`` of the key itself; the nearest parent's if absent."""
        mark = self.root
        if mark is None:
            return None
        for depth, name in enumerate(where):
            last = depth == len(where) - 1
            if last and key and name in mark.keys:
                return mark.keys[name]
            if name not in mark.children:
                return mark.keys.get(name, mark)
            if last and not key and _is_block(mark.children[name]) and name in mark.keys:
                return mark.keys[name]  # a block value begins on its first inner line: show its key
            mark = mark.children[name]
        return mark

    def broken_within(self, where: KeyPath) -> bool:
        """Whether the loader had to leave something out inside this value (a refused key)."""
        mark = self.root
        for part in where:
            mark = mark.children.get(part) if mark is not None else None
        if mark is None or not self.problems:
            return False
        lines = [m.line for m in _inner(mark)]
        head = self.mark(where, key=True)
        first = head.line if head is not None else mark.line
        return any(first < p.line <= max([mark.line, *lines]) + 1 for p in self.problems)

    def rename(self, where: KeyPath, old: str, new: str) -> None:
        """Go on as if ``old`` had been written as ``new``, so that what is inside gets checked too."""
        data, mark = self.data, self.root
        for part in where:
            data = data[part]
            mark = mark.children.get(part) if mark is not None else None
        data[new] = data.pop(old)
        if mark is not None:
            for table in (mark.children, mark.keys):
                if old in table:
                    table[new] = table.pop(old)

    def problem(
        self,
        where: KeyPath,
        slug: str,
        message: str,
        *,
        key: bool = False,
        offset: int | None = None,
        width: int | None = None,
        severity: str = "error",
        suggestion: str = "",
        fix: tuple[str, str] | None = None,
    ) -> Problem:
        """A problem at a key path. ``offset`` counts characters into a one-line scalar."""
        mark = self.mark(where, key=key)
        if mark is None:
            place = f"{self.path}: {key_path(where)}" if where else self.path
            return Problem(place, 0, 0, slug, message, severity, suggestion, fix=fix)
        column, wide = mark.column, mark.width
        if offset is not None and mark.width > 1:
            column += offset + (1 if mark.quoted else 0)
            wide = width or 1
        source = self.lines[mark.line - 1] if 0 < mark.line <= len(self.lines) else ""
        return Problem(self.path, mark.line, column, slug, message, severity, suggestion, source, wide, fix)


def key_path(where: KeyPath) -> str:
    """``rules.loss-spike.when[0]``."""
    text = ""
    for part in where:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def load_file(path: FilePath | str, *, shown: str = "") -> Document:
    """Read and parse one file. Every mistake is in ``problems``; nothing is raised."""
    file = FilePath(path)
    name = shown or str(path)
    document = Document(name, folder=file.parent)
    try:
        if file.is_dir():
            raise IsADirectoryError(21, "is a folder, not a rule file")
        size = file.stat().st_size
        if size > MAX_BYTES:
            return _refuse(document, "too-large", f"the file has {size:,} bytes; rule files may have {MAX_BYTES:,}")
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return _refuse(document, "no-such-file", "there is no such file")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return _refuse(document, "unreadable", f"cannot be read: {reason}")
    if len(raw) > MAX_BYTES:
        return _refuse(document, "too-large", f"rule files may have {MAX_BYTES:,} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        document.problems.append(
            Problem(name, line, 1, "encoding", "the file is not UTF-8 text", suggestion="save it as UTF-8")
        )
        return document
    return parse(text, document)


def load_text(text: str, *, shown: str = "<rules>") -> Document:
    """Parse rules given as YAML text."""
    document = Document(shown)
    if len(text) > MAX_BYTES:
        return _refuse(document, "too-large", f"rules may have {MAX_BYTES:,} characters")
    return parse(text.removeprefix("\ufeff"), document)


def load_mapping(data: Mapping[str, Any], *, shown: str = "rules") -> Document:
    """Rules given as a dict; errors will name the key path instead of a line."""
    document = Document(shown)
    try:
        document.data = _plain(data, 0, [0])
    except ValueError as error:
        return _refuse(document, "not-plain", str(error))
    return document


def parse(text: str, document: Document) -> Document:
    """Fill ``document`` from YAML text."""
    document.lines = text.splitlines()
    if not text.strip():
        return _refuse(document, "empty", "the file is empty", suggestion="begin with `version: 1`")
    import yaml

    fast = getattr(yaml, "CSafeLoader", None)
    if fast is not None:
        trial = Document(document.path, lines=document.lines)
        try:
            _Builder(trial).build(yaml.parse(text, Loader=fast))
            _take(document, trial)
            return document
        except yaml.YAMLError:
            pass  # again with the Python parser: its messages do not depend on the libyaml at hand
    trial = Document(document.path, lines=document.lines)
    try:
        _Builder(trial).build(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        trial.problems.append(_syntax_problem(document, error))
        trial.data = None
    _take(document, trial)
    return document


def _take(document: Document, trial: Document) -> None:
    document.data, document.root = trial.data, trial.root
    document.problems.extend(trial.problems)


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


class _Builder:
    """Builds values and marks from parser events, without recursion."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.stack: list[_Frame] = []
        self.anchors: dict[str, tuple[Any, Mark]] = {}
        self.nodes = 0
        self.documents = 0
        self.deadline = time.monotonic() + MAX_SECONDS

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
        if time.monotonic() > self.deadline:
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
        self.document.problems.append(_problem_at(self.document, mark, slug, message, suggestion))

    def _stop(self, event: Any, slug: str, message: str, *, suggestion: str = "") -> None:
        self._add(self._mark(event), slug, message, suggestion)
        raise _Stop

    def _stop_at(self, mark: Mark, slug: str, message: str) -> None:
        self._add(mark, slug, message, "")
        raise _Stop


def _inner(mark: Mark) -> Iterator[Mark]:
    """All marks of a value's keys and children."""
    stack = [mark]
    while stack:
        top = stack.pop()
        yield from top.keys.values()
        for child in top.children.values():
            yield child
            stack.append(child)


def _is_block(mark: Mark) -> bool:
    return mark.width == 0


def _problem_at(document: Document, mark: Mark, slug: str, message: str, suggestion: str = "") -> Problem:
    source = document.lines[mark.line - 1] if 0 < mark.line <= len(document.lines) else ""
    return Problem(document.path, mark.line, mark.column, slug, message, "error", suggestion, source, mark.width or 1)


def _syntax_problem(document: Document, error: Any) -> Problem:
    """PyYAML's complaint in our words, with the usual way out."""
    place = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if place is None:  # ReaderError: a character that YAML forbids
        position = getattr(error, "position", 0)
        number = "\n".join(document.lines).count("\n", 0, position) + 1
        return _problem_at(document, Mark(number, 1, 1), "syntax", "a control character is not allowed here")
    problem = str(getattr(error, "problem", "") or "").strip()
    context = str(getattr(error, "context", "") or "").strip()
    if "quoted scalar" in context and error.context_mark is not None:
        place = error.context_mark  # where the quote opens; the parser noticed at the end of the file
    mark = Mark(place.line + 1, place.column + 1, 1)
    line = document.lines[place.line] if place.line < len(document.lines) else ""
    text, hint = _explain(problem, context, line)
    return _problem_at(document, mark, "syntax", text, hint)


def _explain(problem: str, context: str, line: str) -> tuple[str, str]:
    if "undefined alias" in problem or "scanning an alias" in context:
        return "a value that starts with `*` is read as a YAML alias", "quote a value that starts with `*`"
    if "scanning an anchor" in context:
        return "a value that starts with `&` is read as a YAML anchor", "quote a value that starts with `&`"
    if "cannot start any token" in problem and "'\\t'" in problem:
        return "a tab cannot indent YAML", "use spaces"
    if "cannot start any token" in problem:
        return f"a value cannot start with {problem.split('character')[-1].split('that')[0].strip()}", "quote the value"
    if "mapping values are not allowed" in problem:
        return "a second `:` in one line", "quote a value that holds `: `, and check the indentation"
    if ("flow mapping" in context or "flow sequence" in context) and "[" in line and "{" in line:
        return "the braces or brackets do not match", 'quote "grad_norm[...]" in braces'
    if "flow mapping" in context or "flow sequence" in context:
        return "the braces or brackets do not match", "each `{` needs a `}`, each `[` a `]`, with commas between"
    if "block mapping" in context or "block collection" in context:
        return "the indentation does not fit the lines above", "keys of one block start in the same column"
    if "quoted scalar" in context:
        return "a quote is never closed", ""
    if "could not find expected ':'" in problem:
        return "a line without `:`", "write `key: value`"
    return f"not valid YAML: {problem or context or 'syntax error'}", ""


def _refuse(document: Document, slug: str, message: str, *, suggestion: str = "") -> Document:
    document.problems.append(Problem(document.path, 0, 0, slug, message, suggestion=suggestion))
    return document


def _plain(value: Any, depth: int, count: list[int]) -> Any:
    """A copy made of dict, list, str, numbers, bool and None, within the limits of files."""
    count[0] += 1
    if count[0] > MAX_NODES:
        raise ValueError(f"more than {MAX_NODES:,} values")
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep (or a value contains itself)")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v, depth + 1, count) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, depth + 1, count) for v in value]
    if isinstance(value, FilePath):
        return str(value)
    raise ValueError(f"a {type(value).__name__} cannot stand in rules; use dicts, lists, text and numbers")
