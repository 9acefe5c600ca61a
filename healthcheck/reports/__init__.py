"""Where samples and alerts go: console, record, files for CI. Registered through the public hook like everybody's."""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.core.protocols import Report
from healthcheck.extend.hookspecs import hookimpl


@hookimpl
def healthcheck_register_reports(register: Callable[[Report], None]) -> None:
    """Fresh reports for one session.

    Equal stops and good checkpoints come first, since the record and all others tell them; the console comes
    last, since it names what the others have written.
    """
    from healthcheck.record.restarts import LastGoodReport, RestartReport
    from healthcheck.record.writer import RecordReport
    from healthcheck.reports.console import ConsoleReport
    from healthcheck.reports.files import FileReports
    from healthcheck.reports.hooktrace import HookTrace, wanted
    from healthcheck.reports.live import DashboardReport
    from healthcheck.reports.notebook import NotebookReport

    register(RestartReport())
    register(LastGoodReport())
    register(RecordReport())
    register(FileReports())
    register(DashboardReport())
    register(NotebookReport())
    register(ConsoleReport())
    if wanted():
        register(HookTrace())
