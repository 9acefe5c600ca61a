"""MLflow's file store: a ``metrics`` folder with one file per metric, lines ``timestamp value step``."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healthcheck.core.protocols import Position
from healthcheck.readers.base import cell, open_text, to_seconds

_LINE = re.compile(rb"^\d{10,16} \S+( \d+)?\s*$")


class MlflowReader:
    """A run folder, its ``metrics`` folder, or one metric file. Files are merged by step."""

    name = "mlflow"
    help = "MLflow run folder (metrics/NAME with lines: timestamp value step)"

    def recognises(self, path: Path, head: bytes) -> float:
        if path.is_dir():
            return 0.85 if metric_files(path) else 0.0
        lines = head.split(b"\n")
        return 0.8 if lines and all(_LINE.match(line) for line in lines[:5] if line) and _LINE.match(lines[0]) else 0.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        if path.is_dir():
            root = path / "metrics" if (path / "metrics").is_dir() else path
            files = {str(f.relative_to(root)): f for f in metric_files(path)}
        else:
            files = {path.name: path}
        streams = [_points(file, name, order) for order, (name, file) in enumerate(files.items())]
        for step, _, time, name, value in heapq.merge(*streams, key=lambda p: (p[0], p[1])):
            yield Position(step, time), {name: value}


def metric_files(folder: Path) -> list[Path]:
    root = folder / "metrics" if (folder / "metrics").is_dir() else folder
    found = []
    for file in sorted(root.rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            with file.open("rb") as opened:
                if not _LINE.match(opened.readline(200)):
                    return []
            found.append(file)
    return found


def _points(file: Path, name: str, order: int) -> Iterator[tuple[int, int, float, str, float]]:
    with open_text(file) as lines:
        for number, line in enumerate(lines, 1):
            parts = line.split()
            if len(parts) >= 2:
                value = cell(parts[1])
                if isinstance(value, float):
                    step = int(parts[2]) if len(parts) > 2 else number
                    yield step, order, to_seconds(float(parts[0])) or 0.0, name, value
