"""Files written behind the step path: a bounded queue and a thread that empties it twice a second.

What is handed to the operating system survives the death of the process, so that ``kill -9`` loses
at most a second. A disk that is full or gone is told once; then the record lives in memory only.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from healthcheck.reports.record.samplelines import Row, SampleEncoder, thin

SECONDS = 0.4
"""How long a line may wait before it is written."""
BACKLOG = 20_000
"""Evaluations that may wait; more are dropped and leave a ``gap`` in the record."""
LIMIT = 50 * 2**20
"""Size in bytes at which ``samples.jsonl`` is thinned."""


class RecordWriter:
    """Appends to ``samples.jsonl`` and ``alerts.jsonl`` of one folder.

    ``trouble`` holds a sentence once something could not be written; poll it from the main thread.
    """

    def __init__(self, folder: Path, *, limit: int = LIMIT, seconds: float = SECONDS) -> None:
        self.folder = folder
        self.trouble = ""
        self._limit = limit
        self._seconds = seconds
        self._queue: deque[tuple[int, float, Sequence[Row]] | tuple[str, bytes]] = deque()
        self._dropped = 0
        self._encoder = SampleEncoder()
        self._size = 0
        self._thinned = 0
        self._alert_steps: list[int] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()

    # -- called from the step path ------------------------------------------------------

    def samples(self, step: int, now: float, rows: Sequence[Row]) -> None:
        if len(self._queue) >= BACKLOG:
            self._dropped += 1
            return
        if self._dropped:
            gap, self._dropped = self._dropped, 0
            self._queue.append(("samples.jsonl", b'{"gap":%d}\n' % gap))
        self._queue.append((step, now, rows))
        if self._thread is None:
            self._begin()

    def alert(self, step: int, line: bytes) -> None:
        """One line of ``alerts.jsonl``; written at once by the thread, not in its usual rhythm."""
        self._alert_steps.append(step)
        self._queue.append(("alerts.jsonl", line))
        if self._thread is None:
            self._begin()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._work, name="healthcheck-record", daemon=True)
        self._thread.start()

    def close(self, wait: float = 10.0) -> None:
        """Write what waits. Gives up after ``wait`` seconds on a disk that does not answer."""
        if os.getpid() != self._pid:
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join(wait)
            if self._thread.is_alive():
                self.trouble = self.trouble or f"the record in {self.folder} is incomplete: the disk does not answer"
                return
        self._empty()

    # -- the thread -----------------------------------------------------------------------

    def _work(self) -> None:
        while not self._ended.wait(self._seconds):
            self._empty()

    def _empty(self) -> None:
        with self._lock:
            pending: dict[str, list[bytes]] = {}
            while self._queue:
                item = self._queue.popleft()
                if len(item) == 2:
                    pending.setdefault(item[0], []).append(item[1])
                else:
                    pending.setdefault("samples.jsonl", []).extend(self._encoder.lines(*item))
            if self.trouble:
                return  # memory only: nothing more is tried until the report at the end
            try:
                for name, lines in pending.items():
                    data = b"".join(lines)
                    append(self.folder / name, data)
                    if name == "samples.jsonl":
                        self._size += len(data)
                if self._size > self._limit:
                    self._thin()
            except OSError as error:
                self.trouble = f"the record in {self.folder} ends here ({error.strerror}); training goes on without it"

    def _thin(self) -> None:
        path = self.folder / "samples.jsonl"
        self._thinned += 1
        smaller = thin(path.read_bytes(), self._thinned, self._alert_steps[-50:])
        temporary = path.with_name(f".{path.name}.{self._pid}")
        try:
            with open(temporary, "wb") as file:
                file.write(smaller)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._size = len(smaller)


def append(path: Path, data: bytes) -> None:
    """Append bytes with one open and no buffer: a forked child inherits nothing that it could write twice."""
    number = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
    try:
        while data:
            data = data[os.write(number, data) :]
    finally:
        os.close(number)
