"""Boxes: what Stable-Baselines, OpenAI Baselines, Spinning Up and Garage print to the console.

::

    ----------------------------------
    | rollout/            |          |
    |    ep_rew_mean      | 21.3     |
    | time/               |          |
    |    total_timesteps  | 4096     |
    ----------------------------------

One box is one row; a name that ends in ``/`` stands in front of the indented names below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from healthcheck.readers.base import Position, head_text, is_binary, open_text
from healthcheck.readers.identify import identify
from healthcheck.readers.values import cell

_RULE = re.compile(r"^\s*[-=+_]{10,}\s*$")
_LINE = re.compile(r"^\s*\|(?P<space>\s*)(?P<name>[^|]*[^|\s])\s*\|\s*(?P<value>[^|]*?)\s*\|\s*$")


class BoxReader:
    """Console logs in which each row is a box with one line per metric."""

    name = "boxes"
    help = "console boxes of Stable-Baselines, OpenAI Baselines and Spinning Up"

    def recognises(self, path: Path, head: bytes) -> float:
        if is_binary(head):
            return 0.0
        told = [row for row in _boxes(head_text(head).split("\n")) if any(identify(name).known for name in row)]
        return 0.75 if len(told) >= 2 else 0.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        with open_text(path) as file:
            for row in _boxes(file):
                yield None, row


def _boxes(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {}
    section = ""
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            if _RULE.match(line):
                if row:
                    yield row
                row, section = {}, ""
            continue
        name = match["name"]
        value = cell(match["value"])
        if value is None and name.endswith("/"):
            section = name
        elif isinstance(value, float):
            row[f"{section}{name}" if len(match["space"]) > 1 else name] = value
