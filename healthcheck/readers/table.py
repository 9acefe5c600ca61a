"""CSV and its relatives: any delimiter, quoted or not, with empty cells, with or without a header.

Lightning ``metrics.csv``, Ultralytics ``results.csv``, Keras CSVLogger, fastai, stable-baselines
``progress.csv``, W&B and TensorBoard exports, pandas.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from healthcheck.core.protocols import Position
from healthcheck.readers.base import UNNAMED, UnreadableRunError, cell, head_text, is_binary, open_text
from healthcheck.readers.columns import identify, said_by_file, step_rank

_DELIMITERS = (",", "\t", ";", "|")
_START = 40
"""Lines that decide what the delimiter is, and whether there is a header."""
_COLUMN_ROWS = 8
"""Numbers below a known name from which on a single column is a record."""
_BLANKS = re.compile(r"\s{1,}")
_MONITOR = {"r": "reward", "l": "episode_length", "t": "time_elapsed"}
"""What the Monitor of OpenAI Baselines and Stable-Baselines writes, one row per episode."""
_TAG = re.compile(r"(?:^|-)tag-(.+)$")


class TableReader:
    """A table in text: one header, one row per line."""

    name = "csv"
    help = "CSV / TSV: Lightning, Ultralytics, Keras, fastai, stable-baselines, W&B and TensorBoard exports"

    def recognises(self, path: Path, head: bytes) -> float:
        if is_binary(head):
            return 0.0
        lines = _useful(head_text(head).split("\n")[:_START])
        if len(head) == 65536 and len(lines) > 2:
            lines.pop()
        if len(lines) < 2 or lines[0].lstrip().startswith(("{", "[", "<", "---")):
            return 0.0
        delimiter = find_delimiter(lines)
        if not delimiter:
            return 0.7 if _is_column(lines, path) else 0.0
        rows = list(_split(lines, delimiter))
        width = len(rows[0])
        if width < 2 or len(rows) < 2:
            return 0.0
        numeric = _numeric(rows[1:])
        if numeric < 0.3:
            return 0.0
        if _fitting(rows) < 0.7:
            return 0.6 if _is_ragged(rows) else 0.0
        header = not _is_nameless(rows[0])
        # Numbers that nothing names may be anything: asked for by name only.
        score = 0.8 if header else 0.4 if delimiter == " " or _known_layout(rows[0], path) else 0.35
        return score - (0.15 if delimiter == " " else 0.0)

    def names(self, path: Path) -> list[str]:
        """The header, with columns that have no value in the first rows; empty without a header."""
        with open_text(path) as file:
            start = list(islice(file, _START))
        lines = _useful(start)
        first = next(_split(lines, find_delimiter(lines) or ","), [])
        return [] if _is_nameless(first) else _header(path, first)

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        with open_text(path) as file:
            start = list(islice(file, _START))
            lines = _useful(start)
            if not lines:
                raise UnreadableRunError(path, "the file is empty")
            delimiter = find_delimiter(lines) or ","
            rows = _split(chain(lines, (x for x in file if x.strip() and not x.startswith("#{"))), delimiter)
            first = next(rows)
            if _is_nameless(first):
                header = ["step", "name", "value"] if _is_triple(first) else _invented(path, first, notes)
                rows = chain([first], rows)
            else:
                header = _header(path, first)
                below = list(_split(lines, delimiter))[1:]
                beyond = bool(below) and all(len(r) == len(header) + 1 for r in below) and any(r[-1] for r in below)
                if beyond and _counts([r[0] for r in below]):
                    header = ["index", *header]  # R's write.table: no name above the numbers of the rows
                if start[0].startswith("#{") and "t_start" in start[0]:
                    header = [_MONITOR.get(name, name) for name in header]
            yield from self._rows(header, first, rows, delimiter == ";", notes)

    def _rows(
        self, header: list[str], first: list[str], rows: Iterator[list[str]], comma: bool, notes: list[str]
    ) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        width = widest = len(header)
        headers = {width: header}
        named = header[0] != f"{UNNAMED}1"
        shorter = longer = again = other = 0
        for cells in rows:
            if cells == first and named and not _any_number(cells):
                again += 1
                header, width = headers[len(cells)], len(cells)
                continue
            if len(cells) != width:
                if named and _is_header(cells):
                    other += len(cells) not in headers
                    header, width = _names(cells), len(cells)
                    headers[width] = header
                    continue
                if len(cells) in headers:
                    header, width = headers[len(cells)], len(cells)
                elif len(cells) < width:
                    shorter += any(name for name in header[len(cells) :])
                else:
                    longer += any(c.strip() for c in cells[width:])
            row: dict[str, Any] = {}
            for name, text in zip(header, cells, strict=False):
                if text:
                    try:
                        row[name] = float(text)
                    except ValueError:
                        value = cell(text, decimal_comma=comma)
                        if value is not None:
                            row[name] = value
            if row:
                yield None, row
        odd = [f"{shorter} {_have(shorter)} fewer: the last columns are empty there"] if shorter else []
        odd += [f"{longer} {_have(longer)} more: what has no name above it was left out"] if longer else []
        if odd:
            notes.append(f"rows are not as wide as the header ({widest} columns); {'; '.join(odd)}")
        if again:
            notes.append(f"the header is repeated {again} times inside the file; skipped")
        if other:
            notes.append(f"{other} more headers inside the file: each one names the rows of its width below it")


def _have(count: int) -> str:
    return "has" if count == 1 else "have"


def find_delimiter(lines: list[str]) -> str:
    """The delimiter that splits the lines most evenly; a blank only if nothing else does."""
    sample = lines[:30]
    best, best_score = "", 0.0
    for delimiter in _DELIMITERS:
        rows = list(_split(sample, delimiter))
        if not rows or len(rows[0]) < 2:
            continue
        score = (_fitting(rows) if len(rows) > 1 else 1.0) + min(len(rows[0]), 50) / 1000
        if score > best_score and score > 0.6:
            best, best_score = delimiter, score
    if best:
        return best
    for delimiter in _DELIMITERS:
        if _is_ragged(list(_split(sample, delimiter))):
            return delimiter
    if len(sample) > 2 and all(_is_triple(_BLANKS.split(line.strip())) for line in sample):
        return " "
    widths = [len(_BLANKS.split(line.strip())) for line in sample]
    numeric = [all(isinstance(cell(c), float) for c in _BLANKS.split(line.strip())) for line in sample[1:]]
    return " " if widths and widths[0] > 1 and len(set(widths)) == 1 and numeric and all(numeric) else ""


def _split(lines: Any, delimiter: str) -> Iterator[list[str]]:
    if delimiter == " ":
        return (_BLANKS.split(line.strip().lstrip("# ")) for line in lines)
    if delimiter == "|":
        return ([c.strip() for c in line.strip().strip("|").split("|")] for line in lines)
    return csv.reader(lines, delimiter=delimiter, skipinitialspace=True)


def _is_triple(cells: list[str]) -> bool:
    """``250 val 3.21``: step, name and value, as build-nanogpt and its many copies write ``log.txt``."""
    return len(cells) == 3 and cells[0].isdigit() and cells[1].isidentifier() and isinstance(cell(cells[2]), float)


def _is_column(lines: list[str], path: Path) -> bool:
    """One column of numbers below a name that we know (``reward``, ``loss``), or in a file that is named so."""
    names, numbers = [line.strip().strip("\"'") for line in lines[:1]], lines[1:]
    named = said_by_file(path) if isinstance(cell(names[0]), float) else identify(names[0]).known
    return (
        len(numbers) >= _COLUMN_ROWS and bool(named) and all(isinstance(cell(line.strip()), float) for line in numbers)
    )


def _is_header(cells: list[str]) -> bool:
    return len(cells) > 1 and all(c.strip() and not isinstance(cell(c), float) for c in cells)


def _fitting(rows: list[list[str]]) -> float:
    """Share of the rows that are as wide as a header above them."""
    widths, fitting, below = {len(rows[0])}, 0, 0
    for cells in rows[1:]:
        if len(cells) not in widths and _is_header(cells):
            widths.add(len(cells))
            continue
        below += 1
        fitting += len(cells) in widths
    return fitting / below if below else 0.0


def _numeric(rows: list[list[str]]) -> float:
    """Share of the filled cells that hold a number."""
    filled = [c for cells in rows for c in cells if c.strip()]
    return sum(isinstance(cell(c), float) for c in filled) / (len(filled) or 1)


_COLUMN = re.compile(r"[\"']?[A-Za-z_%][^\"']{0,79}[\"']?$")


def _is_ragged(rows: list[list[str]]) -> bool:
    """A header of names over rows of numbers, some of them shorter or longer than it."""
    names = [c.strip() for c in rows[0]] if rows else []
    while names and not names[-1]:
        names.pop()
    below = [cells for cells in rows[1:] if len(cells) > 1]
    if len(names) < 2 or len(below) * 2 < len(rows) - 1 or not below:
        return False
    return all(_COLUMN.match(n) and not isinstance(cell(n), float) for n in names) and _numeric(below) >= 0.6


def _counts(cells: list[str]) -> bool:
    """Whether these are the numbers of rows: 0, 1, 2, ... or 1, 2, 3, ..."""
    numbers = [c.strip().strip("\"'") for c in cells]
    return numbers[0] in ("0", "1") and numbers == [str(int(numbers[0]) + i) for i in range(len(numbers))]


def _useful(lines: list[str]) -> list[str]:
    """Without empty lines and comments; ``# epoch loss`` as a first line is a header, ``#{...}`` is not.

    ``%`` begins a comment (MATLAB), unless it is a word of the header: ``% time spent exploring,episodes``.
    """
    kept = [line for line in lines if line.strip() and not line.startswith("#{")]
    matlab = [line for line in kept if line.startswith("%")]
    if len(matlab) != 1 or kept[0] is not matlab[0] or "," not in kept[0]:
        kept = [line for line in kept if not line.startswith("%")]
    comments = [line for line in kept if line.lstrip().startswith("#")]
    body = [line for line in kept if not line.lstrip().startswith("#")]
    if comments and body and not re.match(r"\s*[A-Za-z\"'_]", body[0]):
        return [comments[-1].lstrip().lstrip("# "), *body]
    return body


def _names(first: list[str]) -> list[str]:
    names = [name.strip().strip("\"'") or f"unnamed_{i}" for i, name in enumerate(first)]
    if any(name.endswith("__MIN") for name in names):
        names = _chart_names(names)
    kept: list[str] = []
    for name in names:
        kept.append(name if name not in kept else f"{name}_{len(kept)}")
    return kept


def _header(path: Path, first: list[str]) -> list[str]:
    kept = _names(first)
    if sorted(n.lower() for n in kept if n.lower() not in ("wall time", "timestamp", "time")) in (
        ["step", "value"],
        ["epoch", "value"],
    ):
        # One series per file, as TensorBoard and d3rlpy write it: the file's name is the metric's.
        return [_series_of(path) if n.lower() == "value" else n for n in kept]
    return kept


def _chart_names(names: list[str]) -> list[str]:
    """A chart that W&B exported: ``RUN - train/loss`` with ``__MIN`` and ``__MAX`` beside it.

    The run's name goes where there is one run only; the bands become text names that say so.
    """
    runs = {name.split(" - ", 1)[0] for name in names if " - " in name}
    if len(runs) == 1:
        names = [name.split(" - ", 1)[-1] for name in names]
    return [f"{name.replace('__', ' band ')}" if name.endswith(("__MIN", "__MAX")) else name for name in names]


def _series_of(path: Path) -> str:
    stem = path.name.removesuffix(".gz").rsplit(".", 1)[0]
    match = _TAG.search(stem)
    return match.group(1) if match else stem


def _is_nameless(first: list[str]) -> bool:
    """Whether a first line is no header: it holds numbers, and no name that we know."""
    if not any(isinstance(cell(c), float) for c in first):
        return False
    return not any(step_rank(c) is not None or identify(c).known for c in first if not isinstance(cell(c), float))


def _known_layout(first: list[str], path: Path) -> bool:
    """Rows without names that say by their layout what they are: step and value, epoch, step and value.

    Whole numbers that are written with a point (numpy's ``savetxt``) count where the file is named after the value.
    """
    if _is_triple(first) or len(first) not in (2, 3):
        return _is_triple(first)
    if all(c.strip().isdigit() for c in first[:-1]):
        return True
    before = [cell(c) for c in first[:-1]]
    return bool(said_by_file(path)) and all(isinstance(v, float) and v.is_integer() and v >= 0.0 for v in before)


def _invented(path: Path, first: list[str], notes: list[str]) -> list[str]:
    width = len(first)
    if width == 1 and said_by_file(path):
        header = [said_by_file(path)]
    elif _known_layout(first, path):
        value = said_by_file(path) or _series_of(path)
        header = ["step", value] if width == 2 else ["epoch", "step", value]
    else:
        header = [f"{UNNAMED}{i + 1}" for i in range(width)]
    notes.append(f"no header; columns taken as {', '.join(header)}")
    return header


def _any_number(cells: list[str]) -> bool:
    return any(isinstance(cell(c), float) for c in cells)
