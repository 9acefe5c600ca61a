"""The pytest plugin of healthcheck: watched tests, and rule tests (``*.hctest.yaml``) as test items.

``@pytest.mark.healthcheck(...)`` or the fixture ``healthcheck`` watches whatever training runs inside
a test; a failing rule is an ordinary test failure. Loaded by pytest through the entry point
``healthcheck``, also in projects that never use it. Therefore: only pytest and the standard library
at module level, one suffix check per file and one look at the markers per test. Everything else is
imported where it is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from healthcheck.pytesting.watching import Watched


from collections.abc import Mapping

SUFFIX = ".hctest.yaml"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("healthcheck", "healthcheck")
    group.addoption(
        "--healthcheck-no-rule-tests",
        action="store_true",
        help="do not collect *.hctest.yaml files",
    )
    group.addoption(
        "--healthcheck-plugin",
        action="append",
        default=[],
        metavar="FILE_OR_MODULE",
        help="load a local healthcheck plugin for rule tests (repeatable)",
    )
    group.addoption(
        "--healthcheck-coverage",
        action="store_true",
        help="list rules that no rule test makes fire, or that none sees silent",
    )
    group.addoption(
        "--healthcheck-rules",
        action="append",
        default=[],
        metavar="FILE",
        help="rules of watched tests whose marker names none: file or pack; repeatable, later ones win",
    )
    group.addoption("--healthcheck-profile", metavar="NAME", help="profile of the rules, for instance ci")
    group.addoption(
        "--healthcheck-fail-on",
        choices=("info", "warning", "error", "never"),
        help="severity from which an alert fails a watched test (default error)",
    )
    group.addoption(
        "--healthcheck-report",
        action="append",
        default=[],
        metavar="KIND=PATH",
        help="one report of all watched tests: json=PATH, junit=PATH, sarif=PATH, html=PATH, github; repeatable",
    )
    group.addoption(
        "--healthcheck-update-reference",
        action="store_true",
        help="write what watched tests measure to their reference files instead of comparing",
    )
    group.addoption(
        "--healthcheck-fullgraph",
        action="store_true",
        help="every torch.compile in the tests asks for fullgraph=True (with the eager backend): a graph break fails the test",
    )
    parser.addini("healthcheck_rules", "rules of watched tests: files (from the root folder) or packs", type="linelist")
    parser.addini("healthcheck_profile", "profile of the rules of watched tests")
    parser.addini("healthcheck_fail_on", "severity from which an alert fails a watched test")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "healthcheck(rules=None, profile=None, fail_on=None, max_steps=None, ...): "
        "watch whatever trains inside this test, and fail it by rules",
    )
    if config.getoption("healthcheck_fullgraph"):
        from healthcheck.instrument.fullgraph import CompileTest

        test = CompileTest(fullgraph=True)
        test.install()
        config.add_cleanup(test.restore)
    if hasattr(config, "workerinput"):
        return  # xdist: the controller has the summary and the reports
    if config.getoption("healthcheck_coverage"):
        from healthcheck.pytesting.ruletests import RuleCoverage

        config.pluginmanager.register(RuleCoverage(), "healthcheck-coverage")

    wanted = config.getoption("healthcheck_report")
    config.pluginmanager.register(
        WatchedTests(config, _report_kinds(wanted, config) if wanted else {}), "healthcheck-watched-tests"
    )


def _report_kinds(wanted: list[str], config: pytest.Config) -> dict[str, str]:
    from healthcheck.core.errors import UsageError
    from healthcheck.pytesting.ruletests import plugin_host_of
    from healthcheck.reports.files import kinds_of, parse_reports

    try:
        return parse_reports(wanted, kinds_of(plugin_host_of(config).registry.reports), option="--healthcheck-report")
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


# --------------------------------------------------------------------------- watched tests


@pytest.fixture
def healthcheck(request: pytest.FixtureRequest) -> Watched:
    """Watches this test; shows the series and alerts so far (``healthcheck.series("loss")``)."""
    from healthcheck.pytesting.watching import WATCHED, Watched

    watched: Watched = request.node.stash.setdefault(WATCHED, Watched(request.node.nodeid))
    return watched


@pytest.fixture
def inject(request: pytest.FixtureRequest) -> Generator[Any, None, None]:
    """``inject("nan-grad@3")``: breaks the training of this test at that step, to see which rule fires."""
    from healthcheck.testing.injecting import injector

    yield from injector(request.node)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    if item.get_closest_marker("healthcheck") is None and "healthcheck" not in getattr(item, "fixturenames", ()):
        return (yield)
    from healthcheck.pytesting.watching import watch_call

    return (yield from watch_call(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    report = yield
    if call.when != "call":
        return report
    watching = sys.modules.get("healthcheck.pytesting.watching")
    if watching is None:
        return report
    error = call.excinfo.value if call.excinfo is not None else None
    if report.failed and isinstance(error, watching.HealthCheckFailed):
        report.longrepr = watching.longrepr(error, (str(item.path), (item.location[1] or 0) + 1))
    left = item.stash.get(watching.REPORT, None)
    if left is not None:
        report.healthcheck = left
    return report


# --------------------------------------------------------------------------- rule tests


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if not file_path.name.endswith(SUFFIX) or parent.config.getoption("healthcheck_no_rule_tests"):
        return None
    from healthcheck.pytesting.ruletests import RuleTestCollector

    return RuleTestCollector.from_parent(parent, path=file_path)


# --------------------------------------------------------------------------------------------------
# At the end of a pytest run: a table of the watched tests, and the reports for CI, from all workers.


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
