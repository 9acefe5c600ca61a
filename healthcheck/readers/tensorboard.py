"""TensorBoard event files, through the ``tensorboard`` package (an extra)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healthcheck.readers.aliases import EVAL_WORDS, TEST_WORDS
from healthcheck.readers.base import Position
from healthcheck.readers.errors import UnreadableRunError

_MARK = "tfevents"


class TensorBoardReader:
    """Scalars of one event file, or of all event files directly in a folder (one run, in order)."""

    name = "tensorboard"
    help = "TensorBoard event files (needs the extra: pip install 'torch-healthcheck[tensorboard]')"

    def recognises(self, path: Path, head: bytes) -> float:
        if path.is_dir():
            return 0.8 if event_files(path) else 0.0
        if b"brain.Event:" in head[:64]:
            return 1.0
        return 0.6 if _MARK in path.name and len(head) >= 12 else 0.0

    def read(self, path: Path, notes: list[str]) -> Iterator[tuple[Position | None, dict[str, Any]]]:
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
        skipped: set[str] = set()
        for file in files:
            loader = EventFileLoader(str(file)).Load()
            while True:
                try:
                    event = next(loader)
                except StopIteration:
                    break
                except Exception as error:
                    notes.append(f"{file.name} is damaged ({type(error).__name__}: {error}); read up to there")
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
        if skipped:
            notes.append(f'{len(skipped)} tags "... vs samples" or "... vs iterations" count something else; skipped')


def _phase_of(folder: Path) -> str | None:
    """Keras writes one folder per phase, ``train`` and ``validation``, with the same tags in both."""
    return "eval" if folder.name.lower() in EVAL_WORDS | TEST_WORDS else None


def event_files(folder: Path) -> list[Path]:
    """Event files directly in a folder, in the order in which they were begun."""
    return sorted(p for p in folder.iterdir() if _MARK in p.name and p.is_file())
