"""Where samples and alerts go: console, record, JSON. Registered through the public hook like everybody's."""

from __future__ import annotations

from collections.abc import Callable

from healthcheck.hookspecs import hookimpl
from healthcheck.protocols import Report


@hookimpl
def healthcheck_register_reports(register: Callable[[Report], None]) -> None:
    """Fresh reports for one session. The record first: the console names what it has written."""
    from healthcheck.reports.console import ConsoleReport
    from healthcheck.reports.record import RecordReport
    from healthcheck.reports.report_json import JsonReport

    register(RecordReport())
    register(JsonReport())
    register(ConsoleReport())
