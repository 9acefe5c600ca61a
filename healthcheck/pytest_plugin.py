"""The pytest plugin of healthcheck: rule tests (``*.hctest.yaml``) are ordinary test items.

Loaded by pytest through the entry point ``healthcheck``, also in projects that never use it.
Therefore: only pytest and the standard library at module level, and one suffix check per file
that pytest looks at. Everything else is imported where a rule-test file was really found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from healthcheck.errors import Problem
    from healthcheck.plugins import PluginHost
    from healthcheck.ruletests.model import RuleTest
    from healthcheck.ruletests.run import RuleTestBook

SUFFIX = ".hctest.yaml"

FIRED, SILENT, RULES = "healthcheck_fired", "healthcheck_silent", "healthcheck_rules"
"""User properties of rule tests under ``--healthcheck-coverage``; they reach xdist's controller."""

_host_key = pytest.StashKey["PluginHost"]()


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


# --------------------------------------------------------------------------- collecting


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if not file_path.name.endswith(SUFFIX) or parent.config.getoption("healthcheck_no_rule_tests"):
        return None
    return RuleTestCollector.from_parent(parent, path=file_path)


class BadRuleTestFile(Exception):
    """A rule-test file or a rule file that it names holds mistakes; the message is ready for print."""


class RuleTestFailed(Exception):
    """A rule test came out otherwise than expected; the message says how."""


class _Block:
    """Ready text as pytest's terminal and JUnit reports take it, with a first line for the summary."""

    def __init__(self, text: str, headline: str) -> None:
        self.text = text
        self.reprcrash = SimpleNamespace(message=headline)

    def __str__(self) -> str:
        return self.text

    def toterminal(self, tw: Any) -> None:
        tw.line(self.text)


class RuleTestCollector(pytest.File):
    """One ``*.hctest.yaml`` file."""

    def collect(self) -> Iterable[RuleTestItem]:
        from healthcheck.assembly import load_rules_for
        from healthcheck.errors import UsageError
        from healthcheck.ruletests.run import RuleTestBook

        host = _host(self.config)
        load = partial(load_rules_for, host=host)
        try:
            book = RuleTestBook(self.path, load, host.registry, shown=_shown(self.path))
        except UsageError as error:
            raise BadRuleTestFile(_complaint(error)) from None
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
        from healthcheck.errors import UsageError

        try:
            result = self.book.run(self.rule_test)
        except UsageError as error:
            raise BadRuleTestFile(_complaint(error)) from None
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
            head = f"FAILED {self.nodeid}   ({_shown(self.path)}:{self.rule_test.line})"
            return _Block(f"{head}\n{indented}", str(excinfo.value).splitlines()[0])
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, max(0, self.rule_test.line - 1), self.name


def _host(config: pytest.Config) -> PluginHost:
    """Plugins are loaded once per pytest run, and only if there are rule tests."""
    host = config.stash.get(_host_key, None)
    if host is None:
        from healthcheck.assembly import plugin_host

        host = config.stash[_host_key] = plugin_host(config.getoption("healthcheck_plugin"))
    return host


def _complaint(error: Exception) -> str:
    """All problems with the source line and a caret."""
    problems: tuple[Problem, ...] = getattr(error, "problems", ())
    if not problems:
        return str(error)
    from healthcheck.rulelang.problems import render_text

    return render_text(problems)


def _shown(path: Path) -> str:
    """The path as a person in this directory would type it."""
    try:
        near = os.path.relpath(path)
    except ValueError:  # another drive
        return str(path)
    return str(path) if near.startswith("..") else near
