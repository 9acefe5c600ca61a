"""``--healthcheck-coverage``: which rules have a test that makes them fire, and one that sees them silent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from healthcheck.pytesting.places import shown

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
