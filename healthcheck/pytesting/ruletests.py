"""Rule tests (``*.hctest.yaml``) as test items, and ``--healthcheck-coverage``: which rules they make fire and see silent."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from healthcheck.core.text import visible, visible_lines
from healthcheck.pytesting.failure import complaint, shown

if TYPE_CHECKING:
    from healthcheck.extend.host import PluginHost
    from healthcheck.ruletests.loading import RuleTest
    from healthcheck.ruletests.run import RuleTestBook

FIRED, SILENT, RULES = "healthcheck_fired", "healthcheck_silent", "healthcheck_rules"
"""User properties of rule tests; they reach xdist's controller."""


class RuleCoverage:
    """Which rules have a test that makes them fire, and one in which they are judged and silent."""

    def __init__(self) -> None:
        self.rules: dict[str, None] = {}
        self.fired: set[str] = set()
        self.silent: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        for name, value in report.user_properties:
            if name == RULES:
                self.rules.update(dict.fromkeys(value))  # type: ignore[call-overload]
            elif report.passed and not hasattr(report, "wasxfail"):
                if name == FIRED:
                    self.fired.update(value)  # type: ignore[arg-type]
                elif name == SILENT:
                    self.silent.update(value)  # type: ignore[arg-type]

    def missing(self) -> list[tuple[str, str]]:
        """Rules that lack a test, with what they lack, in file order."""
        found = []
        for rule in self.rules:
            lacks = [word for word, seen in (("firing", self.fired), ("silent", self.silent)) if rule not in seen]
            if lacks:
                found.append((rule, "no " + " and no ".join(lacks) + " test"))
        return found

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.rules:
            return
        missing = self.missing()
        several = len({rule.rpartition("::")[0] for rule in self.rules}) > 1
        terminalreporter.section("rule coverage")
        for rule, lacks in missing:
            where, _, name = rule.rpartition("::")
            terminalreporter.write_line(
                f"  {name} ({shown(Path(where))}): {lacks}" if several else f"  {name}: {lacks}"
            )
        terminalreporter.write_line(
            f"{len(self.rules) - len(missing)} of {len(self.rules)} rules have a firing and a silent test"
        )


# --------------------------------------------------------------------------------------------------
# Rule tests (``*.hctest.yaml``) as pytest items.


_host_key = pytest.StashKey["PluginHost"]()


class BadRuleTestFile(Exception):
    """A rule-test file or a rule file that it names holds mistakes; the message is ready for print."""


class RuleTestFailed(Exception):
    """A rule test came out otherwise than expected; the message says how."""


class _Block:
    """Ready text as pytest's terminal and JUnit reports take it, with a first line for the summary."""

    def __init__(self, text: str, headline: str) -> None:
        self.text = visible_lines(text)
        self.reprcrash = SimpleNamespace(message=visible(headline))

    def __str__(self) -> str:
        return self.text

    def toterminal(self, tw: Any) -> None:
        tw.line(self.text)


class RuleTestCollector(pytest.File):
    """One ``*.hctest.yaml`` file."""

    def collect(self) -> Iterable[RuleTestItem]:
        from healthcheck.assembly import load_rules_for
        from healthcheck.core.errors import UsageError
        from healthcheck.ruletests.run import RuleTestBook

        host = plugin_host_of(self.config)
        load = partial(load_rules_for, host=host)
        try:
            book = RuleTestBook(self.path, load, host.registry, shown=shown(self.path))
        except UsageError as error:
            raise BadRuleTestFile(complaint(error)) from None
        for test in book.tests:
            yield RuleTestItem.from_parent(self, name=test.name, book=book, test=test)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, BadRuleTestFile):
            return str(excinfo.value)
        return super().repr_failure(excinfo)


class RuleTestItem(pytest.Item):
    """One test of a rule-test file."""

    def __init__(self, *, book: RuleTestBook, test: RuleTest, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.book = book
        self.rule_test = test
        if test.xfail is not None:
            # Only our own failure is expected: a broken file is still an error.
            self.add_marker(
                pytest.mark.xfail(reason=test.xfail.reason, raises=RuleTestFailed, strict=test.xfail.strict)
            )

    def runtest(self) -> None:
        from healthcheck.core.errors import UsageError

        try:
            result = self.book.run(self.rule_test)
        except UsageError as error:
            raise BadRuleTestFile(complaint(error)) from None
        if self.config.getoption("healthcheck_coverage"):
            where = self.book.rules_name
            self.user_properties += [
                (RULES, [f"{where}::{rule}" for rule in self.book.own_rules()]),
                (FIRED, [f"{where}::{rule}" for rule in result.fired]),
                (SILENT, [f"{where}::{rule}" for rule in result.silent]),
            ]
        if not result.passed:
            raise RuleTestFailed(result.text)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The difference, without our traceback."""
        if isinstance(excinfo.value, BadRuleTestFile):
            return str(excinfo.value)
        if isinstance(excinfo.value, RuleTestFailed):
            indented = "\n".join(f"  {line}".rstrip() for line in str(excinfo.value).splitlines())
            head = f"FAILED {self.nodeid}   ({shown(self.path)}:{self.rule_test.line})"
            return _Block(f"{head}\n{indented}", str(excinfo.value).splitlines()[0])
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, max(0, self.rule_test.line - 1), self.name


def plugin_host_of(config: pytest.Config) -> PluginHost:
    """Plugins are loaded once per pytest run, and only if there are rule tests."""
    host = config.stash.get(_host_key, None)
    if host is None:
        from healthcheck.assembly import running_host

        host = config.stash[_host_key] = running_host(config.getoption("healthcheck_plugin"))
    return host
