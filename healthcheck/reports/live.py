"""A live table on the terminal: step, loss, learning rate, gradients, memory, speed, time left.

Off until somebody shows it, and without a terminal: a log file is no place for a table that moves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from healthcheck.core.samples import Sample
from healthcheck.core.text import time_left, visible

if TYPE_CHECKING:
    from healthcheck.run.session import Session

_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", "{:.4g}".format),
    ("learning rate", "lr", "{:.3g}".format),
    ("gradient norm", "grad_norm", "{:.4g}".format),
    # Always in MiB: a unit that changes while one looks makes the row jump.
    ("memory", "memory.allocated", lambda value: f"{value / 2**20:,.0f} MiB"),
    ("step time", "time.step", "{:.3g} s".format),
    ("samples per second", "throughput", "{:.4g}".format),
    ("tokens per second", "tokens_per_sec", "{:.4g}".format),
    ("progress", "progress", "{:.0%}".format),
    ("time left", "eta", time_left),
)
"""Label, metric, and how its value is written."""


class DashboardReport:
    """Shows the newest values of a run in a table that is drawn over itself."""

    name = "dashboard"

    def __init__(self) -> None:
        self._session: Session | None = None
        self._live: Any = None
        self._every = 1
        self._drawn = 0
        self._values: dict[str, float] = {}
        self._others: Callable[[], Mapping[str, Any]] = dict
        self._pid = os.getpid()

    def start(self, session: Session) -> None:
        self._session = session

    def show(
        self, every: int = 100, others: Callable[[], Mapping[str, Any]] | None = None, console: Any = None
    ) -> bool:
        """Draw every so many steps from now on. False where there is no terminal.

        :param others: metrics that somebody else logged, shown below ours.
        :param console: a rich console; by default one on stderr.
        """
        if console is None:
            if not (hasattr(sys.stderr, "isatty") and sys.stderr.isatty()):
                return False
            from rich.console import Console

            console = Console(stderr=True)
        if not console.is_terminal:
            return False
        from rich.live import Live

        self._every = max(1, every)
        self._others = others or self._others
        if self._live is None:
            self._live = Live(self.table(), console=console, auto_refresh=False, transient=True)
            self._live.start()
            self.samples = self._samples  # without it a run that shows nothing pays nothing
        return True

    def finish(self, report: Mapping[str, Any]) -> None:
        live, self._live = self._live, None
        if live is not None and os.getpid() == self._pid:
            live.stop()

    def _samples(self, step: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if not sample.labels:
                self._values[sample.metric] = sample.value
        if self._live is not None and step >= self._drawn + self._every and os.getpid() == self._pid:
            self._drawn = step
            self._live.update(self.table(), refresh=True)

    def table(self) -> Any:
        """The table as it stands now."""
        from rich.table import Table

        session = self._session
        title = "training"
        if session is not None:
            epoch = "" if session.epoch is None else f", epoch {session.epoch:.4g}"
            title = f"step {session.step:,}{epoch}, {len(session.alerts)} alerts"
        table = Table(title=title, show_header=False)
        for label, name, written in _ROWS:
            if name in self._values:
                table.add_row(label, written(self._values[name]))
        for name, value in self._others().items():
            if isinstance(value, (int, float)) or hasattr(value, "item"):
                table.add_row(visible(name), f"{float(value):.4g}")
        return table
