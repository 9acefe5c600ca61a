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
    from healthcheck.reports.ci.files import FileReports
    from healthcheck.reports.console.console import ConsoleReport
    from healthcheck.reports.console.dashboard import DashboardReport
    from healthcheck.reports.hooktrace import HookTrace, wanted
    from healthcheck.reports.record.lastgood import LastGoodReport
    from healthcheck.reports.record.record import RecordReport
    from healthcheck.reports.record.requests import LiveRequests
    from healthcheck.reports.record.restarts import RestartReport

    register(RestartReport())
    register(LastGoodReport())
    register(RecordReport())
    register(FileReports())
    register(LiveRequests())
    register(DashboardReport())
    register(ConsoleReport())
    if wanted():
        register(HookTrace())
