"""HuggingFace Trainer: ``trainer_state.json``, alone or in a checkpoint or output folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healthcheck.readers.base import Position
from healthcheck.readers.jsondoc import rows_of_file

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
