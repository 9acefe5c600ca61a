"""Our own run record: a run folder with ``samples.jsonl``, or that file.

One line per evaluation: ``{"step": 12, "t": 3.5, "p": "train", "m": {"loss": 2.3}}``. Names are
series names already; nothing is renamed, so that a replay sees what the live run saw.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healthcheck.readers.base import Position, open_text
from healthcheck.samples import NO_LABELS, Labels

FILE = "samples.jsonl"
_SERIES = re.compile(r"^([^\[]+)\[(.*)\]$")
_decode = json.JSONDecoder().raw_decode


class RecordReader:
    """The record that every watched run writes."""

    name = "record"
    help = "our own run record: a run folder, or its samples.jsonl"
    canonical = True

    def recognises(self, path: Path, head: bytes) -> float:
        if path.is_dir():
            return 1.0 if (path / FILE).is_file() else 0.0
        line = head.split(b"\n", 1)[0]
        try:
            first = json.loads(line)
        except ValueError:
            return 0.0
        return 1.0 if isinstance(first, dict) and "step" in first and isinstance(first.get("m"), dict) else 0.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        file = path / FILE if path.is_dir() else path
        bad = total = 0
        with open_text(file) as lines:
            for line in lines:
                total += 1
                try:
                    row = _decode(line)[0]
                    yield Position(row["step"], row["t"], row.get("p", "train")), row["m"]
                except (ValueError, KeyError, TypeError):
                    bad += bool(line.strip())
        if bad:
            notes.append(f"{bad} of {total} lines of {file.name} are damaged; skipped")


def parse_series(name: str) -> tuple[str, Labels]:
    """The inverse of :func:`healthcheck.samples.series_name`: ``lr[group=1]`` -> metric and labels."""
    match = _SERIES.match(name)
    if match is None:
        return name, NO_LABELS
    labels = []
    for part in match.group(2).split(","):
        key, equals, value = part.partition("=")
        labels.append((key, value) if equals else ("parameter", part))
    return match.group(1), tuple(sorted(labels))
