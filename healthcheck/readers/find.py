"""Finding recorded runs: files, folders and globs; formats are recognised by content."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from healthcheck.extend.guard import describe, passes_on, place_of
from healthcheck.readers.base import UnreadableRunError, read_head
from healthcheck.readers.series import RecordedRun
from healthcheck.readers.tensorboard import event_files, phase_folders

if TYPE_CHECKING:
    from healthcheck.core.protocols import Reader
    from healthcheck.extend.registry import Registry

SURE = 0.4
"""How sure a reader must be of a file that nobody named."""

_NEVER = frozenset({".git", "__pycache__", "node_modules", ".venv", "venv", "site-packages", ".ipynb_checkpoints"})
_CODE = frozenset(
    {".py", ".sh", ".c", ".cpp", ".cu", ".js", ".ts", ".ipynb", ".html", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".rst",
     ".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".npz", ".npy", ".png", ".jpg", ".svg", ".pdf", ".zip", ".tar", ".pkl"}
)  # fmt: skip
"""Endings of files in a folder that are never a record; a file that is named is always looked at."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """A recorded run: where it is and who reads it. ``problem`` is set instead if nobody can."""

    path: Path
    reader: Reader | None
    problem: str = ""


def find_runs(paths: Iterable[str | Path], readers: Mapping[str, Reader] | None = None) -> list[RunFile]:
    """All runs under these files, folders and glob patterns, in the order given, each once.

    A folder that is a run (our record, a checkpoint folder, an MLflow run, event files) is one run;
    in any other folder all files are looked at, and those recognised surely are runs. A path that
    does not exist, or a named file that nobody recognises, comes back with its ``problem``.
    """
    table = readers if readers is not None else default_readers()
    found: dict[Path, RunFile] = {}
    for given in paths:
        for path in _expanded(str(given)):
            for run in _runs_at(path, table):
                found.setdefault(run.path, run)
    return list(found.values())


def default_readers() -> dict[str, Reader]:
    from healthcheck.readers import READERS

    return {reader.name: reader for reader in READERS}


def best_reader(
    path: Path, readers: Mapping[str, Reader], failed: list[str] | None = None
) -> tuple[Reader | None, float]:
    """The reader that is surest of a file or folder, and how sure it is.

    :param failed: takes a sentence for each reader that raised.
    """
    head = b"" if path.is_dir() else read_head(path)
    best: Reader | None = None
    most = 0.0
    for reader in readers.values():
        if most >= getattr(reader, "surest", 2.0):
            continue
        try:
            sure = reader.recognises(path, head)
        except BaseException as error:  # a plugin's reader must not keep the others from looking
            if passes_on(error):
                raise
            if failed is not None:
                failed.append(f"the reader {reader.name} raised {describe(error)} ({place_of(error)})")
            continue
        if sure > most:
            best, most = reader, sure
    return best, most


def recognise(path: Path, readers: Mapping[str, Reader]) -> Reader:
    """The reader of a path that the user named. Raises ``UnreadableRunError`` with what to do."""
    if not path.exists():
        raise UnreadableRunError(path, "no such file or folder")
    if not path.is_file() and not path.is_dir():
        raise UnreadableRunError(path, "a pipe or a device, not a file")
    if path.is_file() and path.stat().st_size == 0:
        raise UnreadableRunError(path, "the file is empty")
    failed: list[str] = []
    reader, _ = best_reader(path, readers, failed)
    if reader is None:
        known = ", ".join(readers)
        raise UnreadableRunError(
            path,
            "; ".join(["not recognised as a recorded run", *failed]),
            f"formats: {known}; for a text log give --pattern with named groups",
        )
    return reader


def _expanded(text: str) -> Iterator[Path]:
    path = Path(os.path.expanduser(text))
    if path.exists() or not glob.has_magic(text):
        yield path
        return
    matches = sorted(glob.glob(str(path), recursive=True))
    if not matches:
        yield path
    for match in matches:
        yield Path(match)


def _runs_at(path: Path, readers: Mapping[str, Reader]) -> Iterator[RunFile]:
    if not path.is_dir():
        try:
            yield RunFile(path, recognise(path, readers))
        except (UnreadableRunError, OSError) as error:
            yield RunFile(path, None, str(error))
        return
    count = 0
    for run in _walk(path, readers):
        count += 1
        yield run
    if not count:
        yield RunFile(path, None, str(UnreadableRunError(path, "no recorded run in this folder")))


def _walk(folder: Path, readers: Mapping[str, Reader]) -> Iterator[RunFile]:
    whole, sure = best_reader(folder, readers)
    if whole is not None and sure >= SURE:
        yield RunFile(folder, whole)
        if whole.name in ("record", "trainer_state", "mlflow"):
            return
    taken_events = whole is not None and whole.name == "tensorboard"
    parts = phase_folders(folder) if taken_events and not event_files(folder) else []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name in _NEVER:
            continue
        if entry.is_dir():
            if not entry.is_symlink() and entry not in parts:
                yield from _walk(entry, readers)
        elif entry.is_file() and entry.suffix.lower() not in _CODE and entry.stat().st_size:
            if taken_events and "tfevents" in entry.name:
                continue
            try:
                reader, sure = best_reader(entry, readers)
            except OSError as error:
                yield RunFile(entry, None, f"{entry}: {error}")
                continue
            if reader is not None and sure >= SURE:
                yield RunFile(entry, reader)


# --------------------------------------------------------------------------------------------------
# The front door: one call from a path to a recorded run.


def read_run(
    path: str | Path | RunFile,
    *,
    mapping: Mapping[str, str] | None = None,
    pattern: str | Sequence[str] | None = None,
    registry: Registry | None = None,
) -> RecordedRun:
    """Open a recorded run.

    :param path: a file or folder, or what :func:`~healthcheck.readers.find.find_runs` found.
    :param mapping: column -> name, before all aliases: ``{"my_obj": "loss", "n": "step"}``. The names
        ``step``, ``time``, ``epoch`` and ``ignore`` are understood besides metrics.
    :param pattern: regular expressions with named groups; the file is then read as a text log.
    :param registry: where plugins have registered readers; the built-in ones without it.

    Raises ``UnreadableRunError`` if nobody recognises the file, ``UsageError`` for a bad pattern.
    """
    found = path.reader if isinstance(path, RunFile) else None
    where = path.path if isinstance(path, RunFile) else Path(path)
    if pattern:
        from healthcheck.readers.textlog import PatternReader

        return RecordedRun(where, PatternReader(pattern), mapping=mapping)
    readers = registry.readers if registry is not None and registry.readers else default_readers()
    return RecordedRun(where, found or recognise(where, readers), mapping=mapping)
