"""YAML text -> PyYAML's nodes, composed within limits, with every mistake in our words.

PyYAML composes; what is here refuses before anything is built: nesting that could exhaust the stack,
aliases that multiply, tags, merge keys, a key given twice. Values come from the nodes by the core
schema of YAML 1.2, places too (:mod:`healthcheck.rulelang.document`). Imported only when a text is read.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from yaml import YAMLError
from yaml.composer import Composer
from yaml.events import AliasEvent, MappingStartEvent, ScalarEvent, StreamEndEvent, StreamStartEvent
from yaml.nodes import MappingNode, ScalarNode
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.scanner import Scanner

from healthcheck.core.text import one_line
from healthcheck.rulelang.document import MAX_DEPTH, MAX_NODES, Document, Mark, Place

CParser: Any
try:
    from yaml.cyaml import CParser  # type: ignore[attr-defined, no-redef, unused-ignore]
except ImportError:  # PyYAML was built without libyaml
    CParser = None
# Where yaml is imported a second time in one process (as pytest's own tests of plugins do), libyaml's binding goes on with
# the classes of the first import, and PyYAML's composer does not know its events.
if CParser is not None and not isinstance(CParser("").get_event(), StreamStartEvent):
    CParser = None

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
_NUMBER_STARTS = frozenset("0123456789+-.")
_QUOTES = frozenset("'\"")
_NOT_PLAIN = _QUOTES | frozenset("|>")
_MERGE = "<<"


def compose(text: str, document: Document) -> None:
    """Set content and places of ``document``, or add what is wrong to its problems.

    libyaml first, for speed. Where it finds a mistake, PyYAML's own parser reads again: its words do
    not depend on the libyaml at hand.
    """
    found = len(document.problems)
    first: Exception | None = None
    if CParser is not None:
        try:
            return _Libyaml(text, document).whole_document()
        except (YAMLError, UnicodeEncodeError) as error:  # the second: half of a surrogate pair
            first = error
            del document.problems[found:]
    try:
        _PyYAML(text, document).whole_document()
    except YAMLError as error:
        document.problems.append(_syntax_problem(document, error))
    except (OverflowError, ValueError):  # of `chr`: PyYAML does not look at the number that an escape gives
        document.problems[found:] = [_no_such_character(document)]
    if first is not None and any(p.slug == "too-slow" for p in document.problems):
        document.problems[found:] = [_syntax_problem(document, first)]


def _built(node: Any) -> tuple[Any, Place]:
    """Value and places of a node: dicts with text as keys, lists, text, numbers, booleans, None."""
    if isinstance(node, ScalarNode):
        value = node.value if node.style in _NOT_PLAIN else _scalar(node.value)
        return value, _place(node.start_mark, node.end_mark, node.style)
    start = node.start_mark
    width = 1 if node.flow_style else 0
    inner: dict[str | int, tuple[Place | None, Place]] = {}
    made: Any
    if isinstance(node, MappingNode):
        made = {}
        for key, inside in node.value:
            name = key.value
            # Of a key given twice the first one counts; the second is among the problems.
            if name not in made and not _is_merge(key):
                made[name], place = _built(inside)
                inner[name] = (_place(key.start_mark, key.end_mark, key.style), place)
    else:
        made = []
        for index, inside in enumerate(node.value):
            value, place = _built(inside)
            made.append(value)
            inner[index] = (None, place)
    return made, (start.line + 1, start.column + 1, width, False, inner)


def _place(start: Any, end: Any, style: str | None) -> Place:
    """Of a key, or of any value that is neither map nor list."""
    line, column = start.line, start.column
    width = end.column - column if end.line == line else 1
    return line + 1, column + 1, width or 1, style in _QUOTES, None


def _scalar(text: str) -> Any:
    """By the core schema of YAML 1.2, as editors have it."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text[0] not in _NUMBER_STARTS or len(text) > MAX_NUMBER_DIGITS:
        return text  # int() refuses thousands of digits, or takes quadratic time for them
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return int(text, 0) if _BASED.fullmatch(text) else text


def _is_merge(key: Any) -> bool:
    return key.value == _MERGE and key.style not in _NOT_PLAIN


class _Refused(Exception):
    """Reading cannot go on; the problem is recorded."""


class _Bounded(Composer):
    """PyYAML's composer, asked for one node at a time by :meth:`compose_node`.

    It is recursive, three calls per level, so the depth is bounded before it descends; events themselves
    come from parsers that keep their own stack.
    """

    # Of the parser that it is mixed with.
    check_event: Any
    get_event: Any
    peek_event: Any

    def __init__(self, document: Document) -> None:
        super().__init__()
        self.document = document
        self.open: list[dict[str, int]] = []
        """For each mapping and list that is not closed yet: its keys and their lines."""
        self.nodes = 0
        self.sizes: dict[str, int] = {}
        """Values in what an anchor names: so many come with each alias."""
        self.containers = 0
        self.deadline = time.process_time() + MAX_SECONDS

    def whole_document(self) -> None:
        """Read the stream. Raises ``yaml.YAMLError``."""
        try:
            self.get_event()  # the start of the stream
            root = None if self.check_event(StreamEndEvent) else self.compose_document()
            if not self.check_event(StreamEndEvent):
                text = "a second YAML document begins here (`---`); use one file each"
                self._refuse(self.get_event(), "several-documents", text)
        except _Refused:
            return
        if root is not None:
            self.document.data, self.document.root = _built(root)

    def compose_node(self, parent: Any, index: Any) -> Any:
        node: Any
        event: Any = self.peek_event()
        anchor = event.anchor
        is_key = index is None and parent is not None
        if isinstance(event, AliasEvent):
            return self._aliased(event, is_key)
        if event.tag is not None and event.tag != "!":
            shown = one_line(event.tag.replace("tag:yaml.org,2002:", "!!"))
            hint = "quote a value that starts with `!`"
            self._refuse(event, "tag", f"YAML tags such as `{shown}` are not allowed", hint)
        is_scalar = isinstance(event, ScalarEvent)
        if is_scalar:
            # As PyYAML's composer would, without asking for a tag: half of the calls of a file.
            node = ScalarNode("", event.value, event.start_mark, event.end_mark, event.style)
            self.get_event()
            if anchor is not None:
                self.anchors[anchor], self.sizes[anchor] = node, 1
            if is_key:
                self._check_key(node)
                return node
            self.nodes += 1
            if self.nodes > MAX_NODES:
                self._too_many(event)
            return node
        self._must_be_value(event, is_key)
        if len(self.open) >= MAX_DEPTH:
            self._refuse(event, "too-deep", f"nested more than {MAX_DEPTH} levels deep")
        before = self.nodes
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self._too_many(event)
        self.containers += 1
        if self.containers % LOOK_AT_CLOCK == 0 and time.process_time() > self.deadline:
            self._refuse(event, "too-slow", f"reading took longer than {MAX_SECONDS:g} s")
        self.open.append({})
        is_mapping = isinstance(event, MappingStartEvent)
        node = self.compose_mapping_node(anchor) if is_mapping else self.compose_sequence_node(anchor)
        self.open.pop()
        if anchor is not None:
            self.sizes[anchor] = self.nodes - before
        return node

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        """Tags are not looked at: they are refused, and :func:`_built` makes the values."""
        return ""

    def _aliased(self, event: Any, is_key: bool) -> Any:
        """The node that an alias stands for: what is wrong with it is shown where it is written."""
        self._must_be_value(event, is_key)
        node: Any = self.anchors.get(event.anchor)
        if node is None:
            text = f"`*{one_line(event.anchor)}` refers to an anchor that does not exist"
            self._refuse(event, "undefined-alias", text, "quote a value that starts with `*`")
        if node.end_mark is None:
            self._refuse(event, "undefined-alias", "an anchor cannot contain itself")
        self.nodes += self.sizes[event.anchor]
        if self.nodes > MAX_NODES:
            self._too_many(event)
        self.get_event()
        return node

    def _check_key(self, key: Any) -> None:
        keys = self.open[-1]
        if _is_merge(key):
            text, hint = "merge keys (`<<`) are not part of rule files", "use `defaults:` or `extends:`"
            self._add(key, "merge-key", text, hint)
        elif key.value in keys:
            text = f'duplicate key "{one_line(key.value)}" (first at line {keys[key.value]})'
            self._add(key, "duplicate-key", text)
        else:
            keys[key.value] = key.start_mark.line + 1

    def _too_many(self, event: Any) -> NoReturn:
        expanded = " once all aliases are expanded" if self.sizes else ""
        self._refuse(event, "too-many-values", f"more than {MAX_NODES:,} values{expanded}")

    def _must_be_value(self, event: Any, is_key: bool) -> None:
        if is_key:
            hint = 'in braces, quote values with brackets: "grad_norm[...]"'
            self._refuse(event, "key-not-text", "a key must be plain text", hint)

    def _add(self, at: Any, slug: str, message: str, hint: str = "") -> None:
        start, end = at.start_mark, at.end_mark
        width = end.column - start.column if end.line == start.line else 1
        mark = Mark(start.line + 1, start.column + 1, max(1, width))
        self.document.problems.append(self.document.problem_at(mark, slug, message, suggestion=hint))

    def _refuse(self, at: Any, slug: str, message: str, hint: str = "") -> NoReturn:
        self._add(at, slug, message, hint)
        raise _Refused


class _PyYAML(_Bounded, Reader, Scanner, Parser):
    def __init__(self, text: str, document: Document) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        _Bounded.__init__(self, document)


if CParser is not None:
    _SIGNS = {
        "FlowMappingStartToken": "{",
        "FlowMappingEndToken": "}",
        "FlowSequenceStartToken": "[",
        "FlowSequenceEndToken": "]",
    }
_OPENS = {"}": "{", "]": "["}


class _Tokens(Reader, Scanner):
    """The words of a YAML text, also of one that cannot be parsed."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)

    def all(self) -> Iterator[Any]:
        while self.check_token():
            yield self.get_token()  # type: ignore[no-untyped-call]


class _Libyaml(_Bounded, CParser):  # type: ignore[misc]
    def __init__(self, text: str, document: Document) -> None:
        CParser.__init__(self, text)
        _Bounded.__init__(self, document)


# --------------------------------------------------------------------------- syntax errors


def _syntax_problem(document: Document, error: Any) -> Any:
    """The problem that a ``yaml.YAMLError`` stands for, with the usual way out."""
    place = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if place is None:  # ReaderError: a character that YAML forbids
        before = "\n".join(document.lines)[: getattr(error, "position", 0)].split("\n")
        mark = Mark(len(before), len(before[-1]) + 1, 1)
        return document.problem_at(mark, "syntax", "a control character is not allowed here", suggestion="delete it")
    problem = str(getattr(error, "problem", "") or "").strip()
    context = str(getattr(error, "context", "") or "").strip()
    opened = getattr(error, "context_mark", None)
    if opened is not None and ("quoted scalar" in context or ("flow" in context and opened.line < place.line)):
        place = opened  # where the quote or brace opens; the parser noticed lines below
    noticed = getattr(error, "problem_mark", None)
    unbalanced = _unbalanced("\n".join(document.lines), noticed) if noticed is not None else None
    if unbalanced is not None:
        mark, text, hint = unbalanced
        return document.problem_at(mark, "syntax", text, suggestion=hint)
    line = document.lines[place.line] if place.line < len(document.lines) else ""
    text, hint = _explain(problem, context, line)
    return document.problem_at(Mark(place.line + 1, place.column + 1, 1), "syntax", text, suggestion=hint)


_ESCAPE = re.compile(r"\\U([0-9A-Fa-f]{8})")


def _no_such_character(document: Document) -> Any:
    """The problem of an escape such as ``"\\UFFFFFFFF"``, at the first one."""
    for number, line in enumerate(document.lines, 1):
        for match in _ESCAPE.finditer(line):
            if int(match[1], 16) > sys.maxunicode:
                mark = Mark(number, match.start() + 1, len(match[0]))
                return document.problem_at(mark, "syntax", f"there is no character {match[0]}")
    return document.problem_at(Mark(1, 1, 1), "syntax", "an escape stands for no character")


_CLOSES = {"{": "}", "[": "]"}


def _unbalanced(text: str, noticed: Any) -> tuple[Mark, str, str] | None:
    """A brace or bracket too many or too few: where it is, what is wrong and what to write; None if all are matched.

    :param noticed: where the parser gave up, which may be lines below the mistake.
    """
    open_here: list[tuple[str, Mark]] = []
    at_error: list[tuple[str, Mark]] | None = None
    try:
        for token in _Tokens(text).all():
            sign = _SIGNS.get(type(token).__name__)
            start = token.start_mark
            late = (start.line, start.column) >= (noticed.line, noticed.column)
            if late and at_error is None:
                at_error = list(open_here)
            if sign is None:
                continue
            mark = Mark(start.line + 1, start.column + 1, 1)
            if sign in _CLOSES:
                open_here.append((sign, mark))
            elif not open_here:
                return mark, f"a `{sign}` without an opening one", f"delete it, or open it with `{_OPENS[sign]}`"
            else:
                opened, where = open_here.pop()
                if _CLOSES[opened] != sign:
                    return where, f"this `{opened}` is closed by `{sign}`", f"close it with `{_CLOSES[opened]}` first"
    except (YAMLError, OverflowError, ValueError):  # the last two: of `chr`, as in `compose`
        return None  # a mistake of another kind, which is answered in its own words
    if not open_here:
        return None
    # The parser gave up inside the innermost one that was open there; of those, one is never closed.
    opened, where = (at_error or open_here)[-1]
    return where, f"this `{opened}` is never closed", f"close it with `{_CLOSES[opened]}`"


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
        return "a bracket in the middle of a word", 'quote "grad_norm[...]" in braces'
    if "flow mapping" in context or "flow sequence" in context:
        return "a `,` is missing here, or a `:` is too many", "write `{key: value, key: value}`, `[one, two]`"
    if "block mapping" in context or "block collection" in context:
        return "the indentation does not fit the lines above", "keys of one block start in the same column"
    if "quoted scalar" in context:
        return "a quote is never closed", ""
    if "could not find expected ':'" in problem:
        return "a line without `:`", "write `key: value`"
    return f"not valid YAML: {problem or context or 'syntax error'}", ""
