"""CSV and its relatives: any delimiter, quoted or not, with empty cells, with or without a header.

Lightning ``metrics.csv``, Ultralytics ``results.csv``, Keras CSVLogger, fastai, stable-baselines
``progress.csv``, W&B and TensorBoard exports, pandas.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from healthcheck.readers.base import Position, head_text, is_binary, open_text
from healthcheck.readers.errors import UnreadableRunError
from healthcheck.readers.values import cell

_DELIMITERS = (",", "\t", ";", "|")
_BLANKS = re.compile(r"\s{1,}")
_TAG = re.compile(r"(?:^|-)tag-(.+)$")


class TableReader:
    """A table in text: one header, one row per line."""

    name = "csv"
    help = "CSV / TSV: Lightning, Ultralytics, Keras, fastai, stable-baselines, W&B and TensorBoard exports"

    def recognises(self, path: Path, head: bytes) -> float:
        if is_binary(head):
            return 0.0
        lines = _useful(head_text(head).split("\n")[:40])
        if len(head) == 65536 and len(lines) > 2:
            lines.pop()
        if len(lines) < 2 or lines[0].lstrip().startswith(("{", "[", "<", "---")):
            return 0.0
        delimiter = find_delimiter(lines)
        if not delimiter:
            return 0.0
        rows = list(_split(lines, delimiter))
        width = len(rows[0])
        if width < 2 or len(rows) < 2:
            return 0.0
        fitting = sum(len(r) == width for r in rows[1:]) / (len(rows) - 1)
        numbers = sum(isinstance(cell(c), float) for r in rows[1:] for c in r)
        filled = sum(bool(c.strip()) for r in rows[1:] for c in r) or 1
        if fitting < 0.7 or numbers / filled < 0.3:
            return 0.0
        header = not any(isinstance(cell(c), float) for c in rows[0])
        score = 0.8 if header else 0.4
        return score - (0.15 if delimiter == " " else 0.0)

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        with open_text(path) as file:
            start: list[str] = []
            for line in file:
                start.append(line)
                if len(start) == 40:
                    break
            lines = _useful(start)
            if not lines:
                raise UnreadableRunError(path, "the file is empty")
            delimiter = find_delimiter(lines) or ","
            rows = _split(chain(lines, (x for x in file if x.strip() and not x.startswith("#{"))), delimiter)
            first = next(rows)
            if any(isinstance(cell(c), float) for c in first):
                header = _invented(path, first, notes)
                rows = chain([first], rows)
            else:
                header = _header(path, first)
            yield from self._rows(header, first, rows, delimiter == ";", notes)

    def _rows(
        self, header: list[str], first: list[str], rows: Iterator[list[str]], comma: bool, notes: list[str]
    ) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        width = len(header)
        odd = again = 0
        for cells in rows:
            if len(cells) != width:
                odd += 1
            elif cells == first and header[0] != "column1" and again >= 0 and not _any_number(cells):
                again += 1
                continue
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
        if odd:
            notes.append(f"{odd} rows have more or fewer cells than the header ({width}); what fits was read")
        if again:
            notes.append(f"the header is repeated {again} times inside the file; skipped")


def find_delimiter(lines: list[str]) -> str:
    """The delimiter that splits the lines most evenly; a blank only if nothing else does."""
    sample = lines[:30]
    best, best_score = "", 0.0
    for delimiter in _DELIMITERS:
        widths = [len(r) for r in _split(sample, delimiter)]
        if not widths or widths[0] < 2:
            continue
        score = sum(w == widths[0] for w in widths) / len(widths) + min(widths[0], 50) / 1000
        if score > best_score and score > 0.6:
            best, best_score = delimiter, score
    if best:
        return best
    widths = [len(_BLANKS.split(line.strip())) for line in sample]
    numeric = [all(isinstance(cell(c), float) for c in _BLANKS.split(line.strip())) for line in sample[1:]]
    return " " if widths and widths[0] > 1 and len(set(widths)) == 1 and numeric and all(numeric) else ""


def _split(lines: Any, delimiter: str) -> Iterator[list[str]]:
    if delimiter == " ":
        return (_BLANKS.split(line.strip().lstrip("# ")) for line in lines)
    if delimiter == "|":
        return ([c.strip() for c in line.strip().strip("|").split("|")] for line in lines)
    return csv.reader(lines, delimiter=delimiter, skipinitialspace=True)


def _useful(lines: list[str]) -> list[str]:
    """Without empty lines and comments; ``# epoch loss`` as a first line is a header, ``#{...}`` is not."""
    kept = [line for line in lines if line.strip() and not line.startswith(("#{", "%"))]
    comments = [line for line in kept if line.lstrip().startswith("#")]
    body = [line for line in kept if not line.lstrip().startswith("#")]
    if comments and body and not re.match(r"\s*[A-Za-z\"'_]", body[0]):
        return [comments[-1].lstrip().lstrip("# "), *body]
    return body


def _header(path: Path, first: list[str]) -> list[str]:
    names = [name.strip().strip("\"'") or f"unnamed_{i}" for i, name in enumerate(first)]
    if any(name.endswith("__MIN") for name in names):
        names = _chart_names(names)
    kept: list[str] = []
    for name in names:
        kept.append(name if name not in kept else f"{name}_{len(kept)}")
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


def _invented(path: Path, first: list[str], notes: list[str]) -> list[str]:
    width = len(first)
    if width == 2:
        header = ["step", _series_of(path)]
    elif width == 3 and "." not in first[0] + first[1]:
        header = ["epoch", "step", _series_of(path)]
    else:
        header = [f"column{i + 1}" for i in range(width)]
    notes.append(f"no header; columns taken as {', '.join(header)}")
    return header


def _any_number(cells: list[str]) -> bool:
    return any(isinstance(cell(c), float) for c in cells)
