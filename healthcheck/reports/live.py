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

if TYPE_CHECKING:
    from healthcheck.reports.screen import Screen
    from healthcheck.run.session import Session


import re
import threading
from typing import TextIO

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


# --------------------------------------------------------------------------------------------------
# What a script prints while the view is drawn: whole lines appear above it, bars of other libraries below it.
#
# ``tqdm`` and ``rich`` draw over themselves with carriage returns and cursor movements, which would tear a view that does the
# same. Such a frame is not passed on: the newest one is shown as part of the view.


MOVES = re.compile(r"\x1b\[(?:\?25[lh]|\d*(?:;\d*)?[A-HJKSTf])")
"""Escape sequences that move the cursor, hide it or erase; colours are none of them."""
MOST = 4
"""Lines of a frame that are shown."""


class Above:
    """Stands in for ``sys.stdout`` or ``sys.stderr`` while a view is drawn; all else is asked of the stream itself.

    :param say: prints whole lines above the view.
    """

    def __init__(self, stream: TextIO, say: Callable[[str], None]) -> None:
        self._stream, self._say = stream, say
        self._part = ""
        self.frame = ""
        """What is drawn over itself here just now."""
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._lock:
            lines = self._take(text)
        if lines:  # outside of the lock: what prints them may write here
            self._say("\n".join(lines))
        return len(text)

    def _take(self, text: str) -> list[str]:
        if MOVES.search(text):
            shown = MOVES.sub("", text)
            over = shown.endswith("\n")  # what is drawn last ends with a line of its own
            frame = [line.rpartition("\r")[2] for line in shown.rstrip("\n").split("\n")]
            frame = [line for line in frame if line.strip()]
            self.frame = "" if over else "\n".join(frame[-MOST:]) or self.frame
            return frame if over else []
        *whole, part = (self._part + text).split("\n")
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in whole]
        if "\r" in part:  # the newest state of a line that is written over; behind a last return it is to come
            self.frame = part.rpartition("\r")[2] or part.rstrip("\r").rpartition("\r")[2]
            part = part.rpartition("\r")[2]
        elif whole:
            self.frame = ""
        self._part = part
        return lines

    def flush(self) -> None:
        """Whole lines are passed on at once; half of one waits for its end."""

    def close_part(self) -> None:
        """What was left without a line end, where the view ends."""
        with self._lock:
            part, self._part, self.frame = self._part, "", ""
        if part.strip():
            self._say(part)


class Redirected:
    """Both streams of the process go above a view, as far as they are its terminal.

    :param say: prints whole lines above the view.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._before: dict[str, TextIO] = {}
        self._put: dict[str, Above] = {}

    def begin(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            try:
                there = stream is not None and stream.isatty()
            except (AttributeError, ValueError):
                there = False
            if there:
                self._before[name] = stream
                self._put[name] = Above(stream, self._say)
                setattr(sys, name, self._put[name])

    @property
    def frame(self) -> str:
        """What other libraries draw over themselves just now."""
        return "\n".join(above.frame for above in self._put.values() if above.frame)

    def end(self) -> None:
        """Give the streams back, unless somebody has replaced them since."""
        for name, stream in self._before.items():
            self._put[name].close_part()
            if getattr(sys, name) is self._put[name]:
                setattr(sys, name, stream)
        self._before.clear()
