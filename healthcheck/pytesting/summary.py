"""At the end of a pytest run: a table of the watched tests, and the reports for CI, from all workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

MOST_ROWS = 30


class WatchedTests:
    """Collects what the watched tests left in their reports. In the process that prints, not in workers."""

    def __init__(self, config: pytest.Config, wanted: Mapping[str, str]) -> None:
        self.config = config
        self.wanted = wanted
        """Kind -> path, of ``--healthcheck-report``."""
        self.tests: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        left: dict[str, Any] | None = getattr(report, "healthcheck", None)
        if left is not None:
            self.tests[str(left["nodeid"])] = {**left, "outcome": report.outcome}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        """Write reports and references."""
        if not self.tests and not self.wanted:
            return
        from healthcheck.core.errors import HealthCheckFailed

        if self.wanted:
            from healthcheck.reports.files import write_reports

            reports = [test["report"] for test in self.tests.values()]
            self.notes += write_reports(self.wanted, reports, folder=self.config.invocation_params.dir)
            if not reports:
                self.notes.append("no test was watched: the reports are empty")
        fresh = [test["reference"] for test in self.tests.values() if "reference" in test]
        if fresh:
            from healthcheck.pytesting.reference import update

            try:
                self.notes += [f"reference written: {path}" for path in update(fresh)]
            except (OSError, HealthCheckFailed) as error:
                self.notes.append(f"reference not written: {error}")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.tests and not self.notes:
            return
        from healthcheck.core.text import visible

        terminal = terminalreporter
        terminal.section("healthcheck")
        from healthcheck.run.ending import VERDICTS

        tests = sorted(
            self.tests.values(),
            key=lambda t: (t["outcome"] == "passed", -VERDICTS.index(str(t["report"]["verdict"]))),
        )
        width = max((len(test["nodeid"]) for test in tests[:MOST_ROWS]), default=0)
        for test in tests[:MOST_ROWS]:
            facts = test["facts"]
            alerts = "" if facts["alerts"] == "none" else f"   {facts['alerts']}"
            row = f"{test['nodeid']:{width}}  {facts['verdict']:14}  {facts['steps']:>6} steps{alerts}"
            terminal.write_line(visible(row))
        if len(tests) > MOST_ROWS:
            terminal.write_line(f"and {len(tests) - MOST_ROWS} more watched tests")
        for note in self.notes:
            terminal.write_line(visible(note))
