"""The live view of a run on its own terminal: ``healthcheck run --live``.

A thread draws it over itself, once a second at most, from what the session remembers anyway: the training thread does nothing
for it. Off until somebody asks for it, and without a terminal: a log file is no place for a picture that moves. What the
script prints meanwhile appears above it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from healthcheck.core.alerts import State, alert_json
from healthcheck.core.text import visible
from healthcheck.reports.above import Redirected

if TYPE_CHECKING:
    from healthcheck.reports.screen import Screen
    from healthcheck.run.session import Session

PER_SECOND = 1.0
"""Drawings in a second, at most."""
MEASURED = ("loss", "grad_norm", "lr", "throughput", "time.step", "time.data", "memory.allocated", "progress", "eta")
"""What the view has measured where no rule asks for it."""


class DashboardReport:
    """Shows the newest values of a run in a picture that is drawn over itself."""

    name = "dashboard"

    def __init__(self) -> None:
        self._session: Session | None = None
        self._live: Any = None
        self._console: Any = None
        self._streams: Redirected | None = None
        self._others: Callable[[], Mapping[str, Any]] = dict
        self._pid = os.getpid()

    def start(self, session: Session) -> None:
        self._session = session
        if session.settings.get("live") and session.info.speaks and self.show():
            session.collect(*MEASURED)

    def show(self, others: Callable[[], Mapping[str, Any]] | None = None, console: Any = None) -> bool:
        """Draw from now on. False where there is no terminal.

        :param others: metrics that somebody else logged, shown below ours.
        :param console: a rich console; by default one on stderr.
        """
        if console is None:
            if not (hasattr(sys.stderr, "isatty") and sys.stderr.isatty()) or os.environ.get("TERM") == "dumb":
                return False
            from rich.console import Console

            console = Console(file=sys.stderr)  # this stream, whatever stands in its place later
        if not console.is_terminal:
            return False
        from rich.live import Live

        self._others = others or self._others
        if self._live is None:
            self._console = console
            self._streams = Redirected(self._say)
            self._live = Live(
                get_renderable=lambda: self.picture(console.width, console.encoding),
                console=console,
                refresh_per_second=PER_SECOND,
                transient=True,
                vertical_overflow="crop",
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
            self._streams.begin()
        return True

    def finish(self, report: Mapping[str, Any]) -> None:
        live, self._live = self._live, None
        if live is not None and os.getpid() == self._pid:
            live.stop()
            if self._streams is not None:
                self._streams.end()

    def _say(self, text: str) -> None:
        """What the script has printed, in its own colours, above the view."""
        from rich.text import Text

        if self._console is not None:
            self._console.print(Text.from_ansi(text), soft_wrap=True)

    def picture(self, width: int, encoding: str = "utf-8") -> Any:
        """The view as it stands now, as rich text."""
        from rich.text import Text

        from healthcheck.reports.screen import screen_lines

        session = self._session
        if session is None or os.getpid() != self._pid:
            return Text("")
        lines = screen_lines(self._screen(session, "utf" in encoding.lower()), width)
        view = Text("\n".join(lines), no_wrap=True)
        if self._streams is not None and (frame := self._streams.frame):
            view = Text.assemble(view, "\n", Text.from_ansi(frame), no_wrap=True, overflow="crop")
        return view

    def _screen(self, session: Session, blocks: bool) -> Screen:
        from healthcheck.reports.screen import Screen

        device = session.controls.device if session.controls is not None else None
        series = {name: values for name in session.history.series() if (values := self._values(session, name))}
        for name, value in self._others().items():
            if (isinstance(value, (int, float)) or hasattr(value, "item")) and name not in series:
                series[visible(name)] = [(session.step, float(value))]
        alerts = list(session.alerts)
        return Screen(
            session.info.target or "training",
            "observing" if session.observing else "running",
            session.step,
            series,
            session.host.registry.units(),
            [alert_json(alert) for alert in alerts],
            self._pressing(session),
            session.stop.most_steps or 0,
            int(getattr(device, "capacity_bytes", lambda: 0)() or 0),
            "" if session.epoch is None else f", epoch {session.epoch:.4g}",
            blocks,
        )

    def _values(self, session: Session, name: str) -> list[tuple[int, float]]:
        """The training thread may add a value while they are copied: then another look finds them whole."""
        for _ in range(3):
            try:
                return session.history(name)
            except (RuntimeError, ValueError):
                continue
        return []

    def _pressing(self, session: Session) -> list[str]:
        """Rules that fire just now, then those that are about to."""
        firing, pending = [], []
        for name, cause in list(session.engine.by_id.items()):
            states = {one.state for one in list(cause.series.values()) if one is not None}
            if State.FIRING in states:
                firing.append(f"{name} fires")
            elif State.PENDING in states:
                pending.append(f"{name} may fire soon")
        return [*firing[:4], *pending[:3]]
