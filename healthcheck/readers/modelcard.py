"""Model cards: the "Training results" table that the HuggingFace Trainer writes into README.md."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healthcheck.core.protocols import Position
from healthcheck.readers.base import UnreadableRunError, cell, head_text, is_binary, open_text
from healthcheck.readers.columns import words

_RULE = re.compile(r"^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$")
_PLAIN = frozenset({"training loss", "train loss", "validation loss", "eval loss", "epoch", "step"})


class ModelCardReader:
    """Markdown tables with a loss and a step or epoch column; the longest one is read."""

    name = "model_card"
    help = "Markdown: the training-results table of a model card"

    def recognises(self, path: Path, head: bytes) -> float:
        if is_binary(head):
            return 0.0
        lines = head_text(head).split("\n")
        return 0.85 if any(_is_header(a, b) for a, b in itertools.pairwise(lines)) else 0.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        with open_text(path) as file:
            tables = list(_tables(file.read().split("\n")))
        if not tables:
            raise UnreadableRunError(path, "no table with a loss and a step or epoch column in this Markdown file")
        header, rows = max(tables, key=lambda t: len(t[1]))
        if len(tables) > 1:
            notes.append(f"{len(tables)} result tables; the longest one ({len(rows)} rows) was read")
        card = {"training loss", "validation loss"} <= {" ".join(words(h)) for h in header}
        names = [f"eval_{h.lower()}" if card and " ".join(words(h)) not in _PLAIN else h for h in header]
        for cells in rows:
            row = {name: value for name, text in zip(names, cells, strict=False) if (value := cell(text)) is not None}
            if row:
                yield None, row


def _cells(line: str) -> list[str]:
    return [c.strip().strip("*`") for c in line.strip().strip("|").split("|")]


def _is_header(line: str, below: str) -> bool:
    if "|" not in line or not _RULE.match(below):
        return False
    named = {w for c in _cells(line) for w in words(c)}
    return bool("loss" in named and named & {"step", "steps", "epoch", "iteration", "iter"})


def _tables(lines: list[str]) -> Iterator[tuple[list[str], list[list[str]]]]:
    index = 0
    while index < len(lines) - 1:
        if not _is_header(lines[index], lines[index + 1]):
            index += 1
            continue
        header = _cells(lines[index])
        rows = []
        index += 2
        while index < len(lines) and "|" in lines[index]:
            rows.append(_cells(lines[index]))
            index += 1
        if rows:
            yield header, rows
