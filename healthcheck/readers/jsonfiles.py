"""Recorded runs as JSON: whole documents, one object per line, and the Trainer's `trainer_state.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healthcheck.core.protocols import Position
from healthcheck.core.text import has_huge_number, load_json
from healthcheck.readers.base import UnreadableRunError, flat, head_text, open_text
from healthcheck.readers.columns import identify, said_by_file, step_rank

_COLUMNS = re.compile(r'"([^"\\]{1,80})"\s*:\s*\[\s*-?\d')
"""The names of lists of numbers."""
_NUMBERS = re.compile(r"\[\s*(?:-?\d[\d.eE+-]*|NaN|null)\s*[,\]]")
"""The beginning of a list of numbers that nothing names."""
_MOST_BYTES = 512 * 1024 * 1024
_decode = json.JSONDecoder().raw_decode


class JsonDocumentReader:
    """A list of row objects, or equally long columns, somewhere in one JSON document."""

    name = "json"
    help = "JSON documents: list of rows or dict of columns (W&B and Comet exports, Keras history)"

    def recognises(self, path: Path, head: bytes) -> float:
        text = head_text(head).lstrip()
        if text.startswith("["):
            if text[1:].lstrip().startswith("{"):
                return 0.8
            return 0.7 if _NUMBERS.match(text) and said_by_file(path) else 0.0
        if not re.match(r'\{\s*"', text):
            return 0.0  # Python prints its dictionaries with other quotes
        if '"log_history"' in text:
            return 0.5  # the reader of trainer_state.json is surer
        try:
            document = load_json(text)
        except ValueError:
            losses = '"loss' in text or "_loss" in text or "/loss" in text
            # The head ends within the document: columns of it may have names that we know.
            names = _COLUMNS.findall(text)
            known = losses or any(identify(name).known or step_rank(name) is not None for name in names)
            return 0.45 if known else 0.0
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
        document = load_json(text)
    except ValueError as error:
        yield from _salvaged(path, text, key, notes, error)
        return
    rows = document.get(key) if key and isinstance(document, dict) else _rows_of(document)
    if isinstance(document, list) and not rows and (name := said_by_file(path)):
        rows = [{name: value} for value in document]
        notes.append(f"a list of bare numbers, taken as {name}")
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


# --------------------------------------------------------------------------------------------------
# JSON lines: one object per line, whatever its keys; nested objects become ``outer/inner``.
#
# TRL, Composer, mmdet, detectron2, fairseq, RLlib's ``result.json`` and most home-made logs.


_scan: Any = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
"""What ``raw_decode`` calls: a value at a place, ``StopIteration`` where none begins."""


class JsonLinesReader:
    """One JSON object per line. Lines that are not JSON are counted and skipped."""

    name = "jsonl"
    help = "JSON lines: one object per line (TRL, mmdet, detectron2, RLlib, home-made)"

    def recognises(self, path: Path, head: bytes) -> float:
        lines = [line for line in (x.strip() for x in head_text(head).split("\n")[:60]) if line]
        good = 0
        for number, line in enumerate(lines):
            if line.startswith("{"):
                try:
                    good += isinstance(load_json(line), dict)
                except ValueError:
                    # The head may end in the middle of its last line.
                    good += number == len(lines) - 1 and number > 0 and good == number
        if not good:
            return 0.0
        if good == len(lines):
            return 0.85 if good > 1 else 0.55
        return 0.7 if good * 2 >= len(lines) else 0.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        bad = number = first_bad = 0
        line = ""
        with open_text(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    row = load_json(line) if has_huge_number(line) else _scan(line, 0)[0]
                except (ValueError, StopIteration, RecursionError):
                    row = _late(line)
                    if row is None:
                        if line.strip():
                            bad += 1
                            first_bad = first_bad or number
                        continue
                if row.__class__ is dict:
                    if line.find("{", 1) > 0 and dict in map(type, row.values()):
                        row = flat(row)
                    yield None, row
        if bad == 1 and first_bad == number and not line.endswith("\n"):
            notes.append(f"line {number} is cut off (the run was ended while writing); skipped")
        elif bad:
            notes.append(f"{bad} of {number} lines are not JSON objects (first: line {first_bad}); skipped")


def _late(line: str) -> Any:
    """An object behind white space or a log prefix: ``2024-05-01 INFO {"loss": 2.3}``."""
    start = line.find("{")
    if start <= 0:
        return None
    try:
        return _decode(line, start)[0]
    except (ValueError, RecursionError):
        return None


# --------------------------------------------------------------------------------------------------
# HuggingFace Trainer: ``trainer_state.json``, alone or in a checkpoint or output folder.


FILE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")


class TrainerStateReader:
    """``log_history`` of a ``trainer_state.json``; of a folder's checkpoints, the latest."""

    name = "trainer_state"
    help = "HuggingFace trainer_state.json, or a checkpoint or output folder that holds one"

    def recognises(self, path: Path, head: bytes) -> float:
        if path.is_dir():
            return 0.9 if state_file(path) else 0.0
        if b'"log_history"' in head:
            return 0.95
        return 0.9 if path.name == FILE and head.lstrip().startswith(b"{") else 0.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        file = state_file(path) or path
        if file != path and file.parent != path:
            notes.append(f"read from {file.relative_to(path)}, the latest checkpoint")
        for row in rows_of_file(file, notes, "log_history"):
            if "train_runtime" in row:
                # The summary at the end of training: its train_loss is the mean of the run.
                continue
            yield None, row


def state_file(folder: Path) -> Path | None:
    """The trainer state of a folder: its own, else that of its latest checkpoint."""
    if not folder.is_dir():
        return None
    own = folder / FILE
    if own.is_file():
        return own
    found = [(int(m.group(1)), p / FILE) for p in folder.iterdir() if (m := _CHECKPOINT.search(p.name))]
    found = [(step, file) for step, file in found if file.is_file()]
    return max(found)[1] if found else None
