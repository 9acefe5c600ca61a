"""The front door: one call from a path to a recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from healthcheck.readers.find import RunFile, default_readers, recognise
from healthcheck.readers.series import RecordedRun

if TYPE_CHECKING:
    from healthcheck.registry import Registry


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
