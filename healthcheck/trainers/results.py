"""What a callback shows of its run, whichever framework it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from healthcheck.outcome import Ending

if TYPE_CHECKING:
    from healthcheck.session import Session
    from healthcheck.trainers.native import NativeWatch
    from healthcheck.verdicts import Alert


class WatchedResults:
    """Results of the run that :attr:`watch` is part of."""

    watch: NativeWatch

    def close(self) -> None:
        """End watching now, whatever the framework does; safe to call twice."""
        self._end(Ending())

    def _end(self, ending: Ending) -> None:
        self.watch.end(ending)

    @property
    def session(self) -> Session | None:
        return self.watch.session

    @property
    def alerts(self) -> list[Alert]:
        """Alerts so far, oldest first."""
        return self.watch.alerts

    @property
    def report(self) -> dict[str, Any] | None:
        """Content of ``report.json``, once training has ended."""
        session = self.session
        return None if session is None else session.report

    @property
    def exit_code(self) -> int:
        """What ``healthcheck run`` would exit with, once training has ended."""
        return int((self.report or {}).get("exit_code", 0))
