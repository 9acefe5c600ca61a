"""TensorBoard event files, through the ``tensorboard`` package (an extra)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healthcheck.core.protocols import Position
from healthcheck.extend.guard import describe
from healthcheck.readers.base import UnreadableRunError
from healthcheck.readers.names import EVAL_WORDS, TEST_WORDS

Item = tuple[Position, dict[str, Any]]

_MARK = "tfevents"
PHASES = frozenset({"train"}) | EVAL_WORDS | TEST_WORDS


class TensorBoardReader:
    """Scalars of one event file, or of all event files directly in a folder (one run, in order).

    A folder that holds the two folders of Keras is one run, too: their values are put in order by their time.
    """

    name = "tensorboard"
    help = "TensorBoard event files (needs the extra: pip install 'torch-healthcheck[tensorboard]')"

    def recognises(self, path: Path, head: bytes) -> float:
        if path.is_dir():
            return 0.8 if event_files(path) or phase_folders(path) else 0.0
        if b"brain.Event:" in head[:64]:
            return 1.0
        return 0.6 if _MARK in path.name and len(head) >= 12 else 0.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
        skipped: set[str] = set()
        folders = phase_folders(path) if path.is_dir() and not event_files(path) else [path]
        streams = [_rows(folder, notes, skipped) for folder in folders]
        yield from heapq.merge(*streams, key=_seconds) if len(streams) > 1 else streams[0]
        if skipped:
            notes.append(f'{len(skipped)} tags "... vs samples" or "... vs iterations" count something else; skipped')


def _rows(path: Path, notes: list[str], skipped: set[str]) -> Iterator[Item]:
    """Scalars of one file, or of the files of one folder."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise UnreadableRunError(
            path,
            f"reading event files needs the tensorboard package ({error})",
            "pip install 'torch-healthcheck[tensorboard]', or export the scalars as CSV",
        ) from error
    files = event_files(path) if path.is_dir() else [path]
    phase = _phase_of(path if path.is_dir() else path.parent)
    for file in files:
        loader = EventFileLoader(str(file)).Load()
        while True:
            try:
                event = next(loader)
            except StopIteration:
                break
            except Exception as error:
                notes.append(f"{file.name} is damaged ({describe(error)}); read up to there")
                break
            if not event.HasField("summary"):
                continue
            row: dict[str, Any] = {}
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name not in ("scalars", ""):
                    continue
                if value.tag.endswith((" vs samples", "_vs_iterations")):
                    # Megatron writes every scalar twice, the second time against samples seen; Keras writes
                    # each validation metric a second time against batches.
                    skipped.add(value.tag)
                    continue
                if value.WhichOneof("value") == "simple_value":
                    row[value.tag] = float(value.simple_value)
                elif value.WhichOneof("value") == "tensor":
                    floats = value.tensor.float_val
                    if len(floats) == 1:
                        row[value.tag] = float(floats[0])
                    else:
                        array = make_ndarray(value.tensor)
                        if array.size == 1 and array.dtype.kind in "fiu":
                            row[value.tag] = float(array.reshape(-1)[0])
            if row:
                yield Position(int(event.step), float(event.wall_time), phase), row


def _seconds(item: Item) -> float:
    return item[0].time or 0.0


def _phase_of(folder: Path) -> str | None:
    """Keras writes one folder per phase, ``train`` and ``validation``, with the same tags in both."""
    return "eval" if folder.name.lower() in EVAL_WORDS | TEST_WORDS else None


def phase_folders(folder: Path) -> list[Path]:
    """The folders of one run that Keras writes, ``train`` and ``validation``; empty unless both are there."""
    found = [
        sub for sub in sorted(folder.iterdir()) if sub.name.lower() in PHASES and sub.is_dir() and event_files(sub)
    ]
    return found if {_phase_of(sub) for sub in found} == {None, "eval"} else []


def event_files(folder: Path) -> list[Path]:
    """Event files directly in a folder, in the order in which they were begun."""
    return sorted(p for p in folder.iterdir() if _MARK in p.name and p.is_file())
