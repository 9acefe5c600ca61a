"""A reader: recorded runs in a format of your own, for `healthcheck replay`.

The format here is a line `# healthcheck_example log`, then `STEP NAME=VALUE ...` on each line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from healthcheck import Position

HEAD = b"# healthcheck_example log"


class LogReader:
    """Reads `STEP NAME=VALUE ...` lines."""

    name = "healthcheck_example"
    help = "lines of STEP NAME=VALUE ... below a line `# healthcheck_example log`"

    def recognises(self, path: Path, head: bytes) -> float:
        return 1.0 if head.startswith(HEAD) else 0.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, Mapping[str, Any]]]:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip() or line.startswith("#"):
                    continue
                try:
                    step, *pairs = line.split()
                    columns = {name: float(value) for name, value in (pair.split("=") for pair in pairs)}
                    yield Position(step=int(step)), columns
                except ValueError:
                    notes.append(f"line {number} is damaged: {line.strip()[:40]}")
