"""The record of a session, written behind the step path: a bounded queue and a thread that empties it twice a second.

What is handed to the operating system survives the death of the process, so that ``kill -9`` loses
at most a second. A disk that is full or gone is reported once; then the record lives in memory only.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.alerts import Alert, alert_json
from healthcheck.core.samples import Sample
from healthcheck.core.text import dump_line, strict
from healthcheck.record.folder import append, folder_of_rank, run_facts, write_atomically, write_once
from healthcheck.record.lines import Row, SampleEncoder
from healthcheck.record.requests import LOOK_SECONDS, LiveRequests
from healthcheck.record.segments import SEGMENT, TAIL, Segments

if TYPE_CHECKING:
    from healthcheck.run.session import Session

SECONDS = 0.4
"""How long a line may wait before it is written."""
BACKLOG = 20_000
"""Evaluations that may wait; more are dropped and leave a ``gap`` in the record."""
LIMIT = 50 * 2**20
"""Bytes of samples, compressed ones included, at which older steps are thinned."""


class RecordWriter:
    """Appends to the samples (see :mod:`healthcheck.record.segments`) and to ``alerts.jsonl`` of one folder.

    ``trouble`` holds a sentence once something could not be written; poll it from the main thread.
    """

    def __init__(self, folder: Path, *, limit: int = LIMIT, segment: int = SEGMENT, seconds: float = SECONDS) -> None:
        self.folder = folder
        self.trouble = ""
        self._seconds = seconds
        self._queue: deque[tuple[int, float, Sequence[Row]] | tuple[str, bytes]] = deque()
        self._dropped = 0
        self._encoder = SampleEncoder()
        self._segments = Segments(folder, limit, segment)
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
            self._queue.append((TAIL, b'{"gap":%d}\n' % gap))
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
                self.trouble = self.trouble or f"the record in {self.folder} is incomplete: the disk does not respond"
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
                    pending.setdefault(TAIL, []).extend(self._encoder.lines(*item))
            if self.trouble:
                return  # memory only: nothing more is tried until the report at the end
            try:
                for name, lines in pending.items():
                    data = b"".join(lines)
                    if name == TAIL:
                        self._segments.append(data, self._alert_steps[-50:])
                    else:
                        append(self.folder / name, data)
            except OSError as error:
                self.trouble = f"the record in {self.folder} ends here ({error.strerror}); training goes on without it"


# --------------------------------------------------------------------------------------------------
# The record of a run: ``run.json``, ``rules.yaml``, ``samples.jsonl``, ``alerts.jsonl``, ``report.json``.
#
# Rank 0 writes all of it as it happens. Other ranks keep the last evaluations in memory and write
# only around their alerts (setting ``record_ranks: all`` changes that). Format: docs/reference/record.md.


_ROW: Callable[[Sample], Row] = attrgetter("metric", "labels", "step", "phase", "value")
"""What is written of a sample."""
RING = 200
"""Evaluations that other ranks keep in memory."""
AFTER = 50
"""Evaluations that other ranks write after an alert."""


class RecordReport:
    """The record of one session; silent where there is no folder."""

    name = "record"

    def __init__(self) -> None:
        self._session: Session | None = None
        self._writer: RecordWriter | None = None
        self._folder: Path | None = None
        self._ring: deque[tuple[int, float, list[Row]]] | None = None
        self._until = 0
        self._said = False
        self._pid = os.getpid()
        self._requests: LiveRequests | None = None
        self._look_at = 0.0

    def start(self, session: Session) -> None:
        folder = folder_of_rank(session.info)
        if folder is None:
            return
        self._session, self._pid = session, os.getpid()
        if not session.info.speaks and session.settings.get("record_ranks") != "all":
            self._ring = deque(maxlen=RING)
        self._folder = folder.absolute()
        self._writer = RecordWriter(self._folder)
        if self._ring is None and not self._write_start():
            session.info.notes.append(self._writer.trouble)  # the start block says it; the console is not ready yet
            self._said = True
        if session.info.speaks and session.rules.causes:  # the rank that speaks asks the others
            self._requests = LiveRequests(session, folder)
        # Only a session with a record pays for the hot hook: without the attribute nobody calls it.
        self.samples = self._samples

    def rules(self, session: Session) -> None:
        """Others have joined: a replay judges by all of them."""
        if self._folder is None or not (self._folder / "rules.yaml").is_file() or os.getpid() != self._pid:
            return
        if session.info.speaks and session.rules.causes and self._requests is None:
            self._requests = LiveRequests(session, self._folder)
        try:
            fresh = self._folder / ".rules.yaml"
            fresh.unlink(missing_ok=True)
            append(fresh, session.rules.text.encode())
            os.replace(fresh, self._folder / "rules.yaml")
        except OSError as error:
            self._trouble(f"rules that joined could not be written to {self._folder} ({error.strerror})")

    def alert(self, alert: Alert) -> None:
        self._write_alert(alert)

    def amended(self, alert: Alert) -> None:
        self._write_alert(alert, transition="cause")

    def acted(self, alert: Alert) -> None:
        self._write_alert(alert)

    def cleared(self, alert: Alert) -> None:
        self._write_alert(alert)

    def finish(self, report: dict[str, Any]) -> None:
        if self._writer is None or self._folder is None or os.getpid() != self._pid:
            return
        self._writer.close()
        self._say_trouble()
        if self._ring is not None and not self._folder.is_dir():
            return  # a quiet rank leaves nothing behind
        try:
            write_atomically(self._folder / "report.json", strict(report))
        except OSError as error:
            self._trouble(f"report.json could not be written to {self._folder} ({error.strerror})")

    # -- the step path ------------------------------------------------------------------

    def _samples(self, step: int, samples: Sequence[Sample]) -> None:
        session, writer = self._session, self._writer
        if session is None or writer is None or os.getpid() != self._pid:
            return
        if self._requests is not None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            self._requests.look()
        # Not the samples themselves: their details hold on to tensors.
        rows = list(map(_ROW, samples))
        now = session.judge.judged_at
        if self._ring is None or step <= self._until:
            writer.samples(step, now, rows)
        else:
            self._ring.append((step, now, rows))
        if writer.trouble and not self._said:
            self._say_trouble()

    # -- alerts and the start -------------------------------------------------------------

    def _write_alert(self, alert: Alert, *, transition: str = "") -> None:
        if self._writer is None or self._folder is None or os.getpid() != self._pid:
            return
        if self._ring is not None:
            if not self._folder.is_dir() and not self._write_start():
                self._say_trouble()
                return
            self._until = alert.detected_step + AFTER
            while self._ring:
                self._writer.samples(*self._ring.popleft())
        entry = alert_json(alert)
        if alert.repeat:
            entry["repeat"] = True
        if transition:
            entry["transition"] = transition
        self._writer.alert(alert.fired_step, dump_line(entry))

    def _write_start(self) -> bool:
        assert self._session is not None
        assert self._folder is not None
        assert self._writer is not None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._folder / "run.json", strict(run_facts(self._session, time.time())))
            if not (self._folder / "rules.yaml").exists():
                write_once(self._folder / "rules.yaml", self._session.rules.text.encode())
        except OSError as error:
            self._writer.trouble = f"no record in {self._folder} ({error.strerror}); training goes on without it"
            return False
        return True

    def _trouble(self, text: str) -> None:
        assert self._writer is not None
        self._writer.trouble = self._writer.trouble or text
        self._say_trouble()

    def _say_trouble(self) -> None:
        if self._said or self._writer is None or not self._writer.trouble or self._session is None:
            return
        self._said = True
        self._session.note(self._writer.trouble)
