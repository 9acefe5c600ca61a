"""YAML -> plain Python values with a line and column for every key and value. Safe by construction.

Not ``yaml.safe_load``: under YAML 1.1 ``1e-3`` is a string, ``off`` and ``no`` are booleans, ``010``
is eight, and a duplicate key silently wins. Here scalars follow the core schema of YAML 1.2, as
editors do; keys are always text; duplicate keys, tags, merge keys and several documents are
refused; and size, number of nodes, depth, alias expansion and time are bounded.
"""

from __future__ import annotations

import marshal
import stat
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from healthcheck.core.errors import Problem
from healthcheck.core.text import suggest
from healthcheck.rulelang import parsed
from healthcheck.rulelang.document import MAX_DEPTH, MAX_NODES, Document, Place

MAX_BYTES = 1 << 20
KEPT, LONGEST_KEPT = 32, 1 << 17
"""Texts (and their longest) that are not parsed again: `check` looks at the same packs for each profile, a notebook
for each run."""

_read: dict[str, tuple[Any, Place | None]] = {}
"""Texts without a mistake, what they say, and the places of it."""


def load_file(path: FilePath | str, *, shown: str = "") -> Document:
    """Read and parse one file. Every mistake is in ``problems``; nothing is raised."""
    file = FilePath(path)
    name = shown or str(path)
    document = Document(name, folder=file.parent)
    try:
        if file.is_dir():
            raise IsADirectoryError(21, "is a folder, not a rule file")
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe may never end, and a device may do anything
            raise OSError(22, "is a pipe or a device, not a file")
        size = found.st_size
        if size > MAX_BYTES:
            return _refuse(document, "too-large", f"the file has {size:,} bytes; rule files may have {MAX_BYTES:,}")
        with file.open("rb") as stream:  # a growing file has no honest size: the limit holds again
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return _refuse(document, "no-such-file", "there is no such file", suggestion=_nearest(file))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return _refuse(document, "unreadable", f"cannot be read: {reason}")
    if len(raw) > MAX_BYTES:
        return _refuse(document, "too-large", f"rule files may have {MAX_BYTES:,} bytes")
    try:
        text = raw.decode("utf-8-sig")  # editors on Windows begin files with a byte order mark
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        before = raw[raw.rfind(b"\n", 0, error.start) + 1 : error.start].decode("utf-8", "replace")
        document.problems.append(
            Problem(
                name, line, len(before) + 1, "encoding", "the file is not UTF-8 text", suggestion="save it as UTF-8"
            )
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
    known = _read.get(text) or parsed.find(text)
    if known is None:
        from healthcheck.rulelang.yamltree import compose

        compose(text, document)
        if document.root is None and not document.problems:
            hint = "begin with `version: 1`"
            return _refuse(document, "empty", "the file holds nothing but comments", suggestion=hint)
        if document.problems or len(text) > LONGEST_KEPT:
            return document
        known = (document.data, document.root)
    if text not in _read:
        for oldest in list(_read)[: max(0, len(_read) - KEPT + 1)]:
            _read.pop(oldest, None)
        _read[text] = known
    document.text = text
    # Lists and maps of its own for every document: what is done to the one must not show in the next.
    document.data, document.root = marshal.loads(marshal.dumps(known[0])), known[1]
    return document


def shape_is_right(text: str, format: str) -> None:
    """A text was found to have the shape of a format, given by its mark: not to be asked again, in this process or another."""
    parsed.known.setdefault(text, set()).add(format)
    if text in _read:
        parsed.keep(text, *_read[text])


def _refuse(document: Document, slug: str, message: str, *, suggestion: str = "") -> Document:
    document.problems.append(Problem(document.path, 0, 0, slug, message, suggestion=suggestion))
    return document


def _nearest(file: FilePath) -> str:
    """The YAML file beside a missing one whose name is most like it, or where was looked."""
    try:
        here = [path.name for path in file.parent.iterdir() if path.suffix in (".yaml", ".yml")]
    except OSError:
        return f"there is no folder {file.parent}"
    return suggest(file.name, here) or f"looked in {file.parent.absolute()}"


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
    raise ValueError(f"a {type(value).__name__} cannot be used in rules; use dicts, lists, text and numbers")
