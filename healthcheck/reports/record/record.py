"""The record of a run: ``run.json``, ``rules.yaml``, ``samples.jsonl``, ``alerts.jsonl``, ``report.json``.

Rank 0 writes all of it as it happens. Other ranks keep the last evaluations in memory and write
only around their alerts (setting ``record_ranks: all`` changes that). Format: docs/reference/record.md.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.outcome import alert_json
from healthcheck.reports.record.rundir import write_atomically
from healthcheck.reports.record.runfacts import run_facts
from healthcheck.reports.record.samplelines import Row
from healthcheck.reports.record.writing import RecordWriter, append
from healthcheck.reports.strict import dump_line, strict
from healthcheck.samples import Sample
from healthcheck.verdicts import Alert

if TYPE_CHECKING:
    from healthcheck.session import Session

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
        self._open_step: int | None = None

    def start(self, session: Session) -> None:
        folder = session.info.run_dir
        if folder is None:
            return
        self._session, self._pid = session, os.getpid()
        if session.info.rank and session.settings.get("record_ranks") != "all":
            self._ring = deque(maxlen=RING)
        if session.info.rank and not folder.name.startswith("rank-"):
            folder = folder / f"rank-{session.info.rank}"
        self._folder = folder.absolute()
        self._writer = RecordWriter(self._folder)
        if self._ring is None and not self._write_start():
            session.info.notes.append(self._writer.trouble)  # the start block says it; the console is not ready yet
            self._said = True
        # Only a session with a record pays for the hot hook: without the attribute nobody calls it.
        self.samples = self._samples
        if any(rule.condition.absence == "steps" for rule in session.rules.rules):
            session.on("step_end", self._step_ends)

    def alert(self, alert: Alert) -> None:
        self._write_alert(alert)

    def acted(self, alert: Alert) -> None:
        self._write_alert(alert)

    def cleared(self, alert: Alert) -> None:
        self._write_alert(alert)

    def finish(self, report: dict[str, Any]) -> None:
        if self._writer is None or self._folder is None or os.getpid() != self._pid:
            return
        self._close_open_step()
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
        if self._open_step is not None:
            if self._open_step != step:
                self._close_open_step()
            self._open_step = None
        # Not the samples themselves: their details hold on to tensors.
        rows = [(s.metric, s.labels, s.step, s.phase, s.value) for s in samples]
        now = session.judged_at
        if self._ring is None or step <= self._until:
            writer.samples(step, now, rows)
        else:
            self._ring.append((step, now, rows))
        if writer.trouble and not self._said:
            self._say_trouble()

    def _step_ends(self, event: Any) -> None:
        """Rules that count steps without a sample are also judged at steps that have none."""
        self._close_open_step()
        self._open_step = event.step

    def _close_open_step(self) -> None:
        if (
            self._open_step is not None
            and self._writer is not None
            and self._session is not None
            and self._ring is None
        ):
            self._writer.samples(self._open_step, self._session.active(), [])
        self._open_step = None

    # -- alerts and the start -------------------------------------------------------------

    def _write_alert(self, alert: Alert) -> None:
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
        self._writer.alert(alert.fired_step, dump_line(entry))

    def _write_start(self) -> bool:
        assert self._session is not None
        assert self._folder is not None
        assert self._writer is not None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(self._folder / "run.json", strict(run_facts(self._session, time.time())))
            append(self._folder / "rules.yaml", self._session.rules.text.encode())
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
