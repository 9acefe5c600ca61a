"""Where samples and alerts go: console, record, files for CI. Registered through the public hook like everybody's."""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.hookspecs import hookimpl
from healthcheck.protocols import Report


@hookimpl
def healthcheck_register_reports(register: Callable[[Report], None]) -> None:
    """Fresh reports for one session.

    Equal stops and good checkpoints come first, since the record and all others tell them; the console comes
    last, since it names what the others have written.
    """
    from healthcheck.reports.console import ConsoleReport
    from healthcheck.reports.dashboard import DashboardReport
    from healthcheck.reports.files import FileReports
    from healthcheck.reports.hooktrace import HookTrace, wanted
    from healthcheck.reports.lastgood import LastGoodReport
    from healthcheck.reports.record import RecordReport
    from healthcheck.reports.requests import LiveRequests
    from healthcheck.reports.restarts import RestartReport

    register(RestartReport())
    register(LastGoodReport())
    register(RecordReport())
    register(FileReports())
    register(LiveRequests())
    register(DashboardReport())
    register(ConsoleReport())
    if wanted():
        register(HookTrace())
