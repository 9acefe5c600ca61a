"""JSON documents that hold a history: a list of rows, or a dict of columns (Keras ``History.history``).

Weights & Biases history exports, Comet metric lists, ``all_results``-style files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healthcheck.readers.base import Position, flat, head_text, open_text
from healthcheck.readers.errors import UnreadableRunError

_MOST_BYTES = 512 * 1024 * 1024
_decode = json.JSONDecoder().raw_decode


class JsonDocumentReader:
    """A list of row objects, or equally long columns, somewhere in one JSON document."""

    name = "json"
    help = "JSON documents: list of rows or dict of columns (W&B and Comet exports, Keras history)"

    def recognises(self, path: Path, head: bytes) -> float:
        text = head_text(head).lstrip()
        if text.startswith("["):
            return 0.8 if text[1:].lstrip().startswith("{") else 0.0
        if not text.startswith("{"):
            return 0.0
        if '"log_history"' in text:
            return 0.5  # the reader of trainer_state.json is surer
        try:
            document = json.loads(text)
        except ValueError:
            return 0.45 if '"loss' in text or "_loss" in text or "/loss" in text else 0.0
        return 0.8 if _rows_of(document) else 0.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        for row in rows_of_file(path, notes):
            yield None, flat(row)


def rows_of_file(path: Path, notes: list[str], key: str = "") -> Iterator[dict[str, Any]]:
    """Rows of a JSON document; what can be read of a cut-off one, with a note."""
    if path.stat().st_size > _MOST_BYTES:
        raise UnreadableRunError(path, "a JSON document over 512 MiB", "write it as JSON lines, which are streamed")
    with open_text(path) as file:
        text = file.read()
    try:
        document = json.loads(text)
    except ValueError as error:
        yield from _salvaged(path, text, key, notes, error)
        return
    rows = document.get(key) if key and isinstance(document, dict) else _rows_of(document)
    if not isinstance(rows, list) or not rows:
        raise UnreadableRunError(
            path, "this JSON document holds no list of rows", "see docs/reference/recorded-runs.md"
        )
    yield from (row for row in rows if isinstance(row, dict))


def _rows_of(document: Any, depth: int = 0) -> list[dict[str, Any]]:
    """The longest list of objects (or set of columns) in a document, two levels deep."""
    if isinstance(document, list):
        return [row for row in document if isinstance(row, dict)]
    if not isinstance(document, dict) or depth > 2:
        return []
    columns = {k: v for k, v in document.items() if isinstance(v, list) and v and not isinstance(v[0], (dict, list))}
    best: list[dict[str, Any]] = []
    if columns and max(map(len, columns.values())) > 1:
        length = max(map(len, columns.values()))
        best = [{k: v[i] for k, v in columns.items() if i < len(v)} for i in range(length)]
    for value in document.values():
        if isinstance(value, (dict, list)):
            found = _rows_of(value, depth + 1)
            if len(found) > len(best) and any(len(r) > 1 for r in found[:3]):
                best = found
    return best


def _salvaged(path: Path, text: str, key: str, notes: list[str], error: ValueError) -> Iterator[dict[str, Any]]:
    start = text.find("[", text.find(f'"{key}"') if key else 0)
    count = 0
    position = start + 1
    while start >= 0:
        while position < len(text) and text[position] in " \t\r\n,":
            position += 1
        try:
            row, position = _decode(text, position)
        except ValueError:
            break
        if isinstance(row, dict):
            count += 1
            yield row
    if not count:
        raise UnreadableRunError(path, f"damaged JSON ({error})", "nothing of it could be read")
    notes.append(f"the file is damaged ({error}); the first {count} rows were read")
