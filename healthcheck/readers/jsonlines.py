"""JSON lines: one object per line, whatever its keys; nested objects become ``outer/inner``.

TRL, Composer, mmdet, detectron2, fairseq, RLlib's ``result.json`` and most home-made logs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healthcheck.readers.base import Position, flat, head_text, open_text

_decode = json.JSONDecoder().raw_decode
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
                    good += isinstance(json.loads(line), dict)
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
                    row, _ = _scan(line, 0)
                except (ValueError, StopIteration):
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
            notes.append(f"{bad} of {number} lines are no JSON objects (first: line {first_bad}); skipped")


def _late(line: str) -> Any:
    """An object behind white space or a log prefix: ``2024-05-01 INFO {"loss": 2.3}``."""
    start = line.find("{")
    if start <= 0:
        return None
    try:
        return _decode(line, start)[0]
    except ValueError:
        return None
