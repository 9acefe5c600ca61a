"""Reads ``*.hctest.yaml``: every mistake of the file at once, each with line and column."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from healthcheck.dispatch import suggest
from healthcheck.errors import Problem
from healthcheck.rulelang.document import Document, KeyPath
from healthcheck.rulelang.loader import load_file
from healthcheck.rulelang.quantities import shorten
from healthcheck.ruletests.fields import EXPECT_KEYS, TEST_KEYS, shown
from healthcheck.ruletests.inputs import SeriesFields
from healthcheck.ruletests.model import (
    DEFAULT_STEP_TIME,
    FORMAT_KEY,
    FORMAT_VERSION,
    Expected,
    RuleTest,
    RuleTestFile,
    Xfail,
)

FILE_KEYS = (FORMAT_KEY, "rules", "profile", "step_time", "warmup", "tests")


def load_tests(path: Path, *, shown: str = "") -> tuple[RuleTestFile, list[Problem]]:
    """Read one file: what could be understood, and all mistakes that show without the rules.

    :param shown: how messages call it.
    """
    reader = _Reader(load_file(path, shown=shown), path)
    return reader.file(), reader.problems


class _Reader(SeriesFields):
    """Walks one document; collects problems instead of raising."""

    def __init__(self, document: Document, path: Path) -> None:
        super().__init__(document, path)
        self.names: dict[str, int] = {}

    # -- the file ---------------------------------------------------------------------

    def file(self) -> RuleTestFile:
        made = RuleTestFile(self.path, self.document)
        data = self.document.data
        if self.problems and data is None:
            return made
        if not isinstance(data, dict):
            self.bad((), "a rule-test file is a mapping", f"begin with `{FORMAT_KEY}: {FORMAT_VERSION}`")
            return made
        self.known_keys((), data, FILE_KEYS)
        version = data.get(FORMAT_KEY)
        if version is None:
            self.bad((), f"`{FORMAT_KEY}` is missing", f"begin with `{FORMAT_KEY}: {FORMAT_VERSION}`", slug="version")
        elif version != FORMAT_VERSION or isinstance(version, bool):
            newer = isinstance(version, int) and version > FORMAT_VERSION
            text = "this file needs a newer healthcheck" if newer else f"`{FORMAT_KEY}` must be {FORMAT_VERSION}"
            self.bad((FORMAT_KEY,), text, slug="version")
        before = len(self.problems)
        rules = tuple(self.rules(data))
        made.rules = rules if len(self.problems) == before else ()  # half of the rules would only raise more errors
        step_time = self.duration((), data, "step_time", DEFAULT_STEP_TIME)
        profile = str(self.value((), data, "profile", str, "a profile name", ""))
        warmup = self.whole((), data, "warmup", None)
        tests = data.get("tests")
        if not isinstance(tests, list) or not tests:
            self.bad(("tests",) if "tests" in data else (), "`tests` must be a list with at least one test", key=True)
            return made
        for index, entry in enumerate(tests):
            test = self.test(("tests", index), entry, step_time, profile, warmup)
            if test is not None:
                made.tests.append(test)
        return made

    def rules(self, data: dict[str, Any]) -> Iterable[Any]:
        given = data.get("rules")
        listed = given if isinstance(given, list) else [given]
        if given is None or not listed:
            self.bad(
                ("rules",) if "rules" in data else (), "`rules` names the files to test", "write `rules: [team.yaml]`"
            )
            return
        for index, entry in enumerate(listed):
            where: KeyPath = ("rules", index) if isinstance(given, list) else ("rules",)
            if isinstance(entry, dict):
                yield entry
            elif not isinstance(entry, str) or not entry.strip():
                self.bad(where, f"`rules` holds file or pack names, found {shown(entry)}")
            elif ":" in entry and not entry.endswith((".yaml", ".yml")):
                yield entry  # a pack: healthcheck:recommended@1
            else:
                file = self.path.parent / entry
                if not file.is_file():
                    self.bad(
                        where,
                        f"there is no file {shorten(entry)} beside this one",
                        self.near_file(entry),
                        slug="no-such-file",
                    )
                yield file.resolve()

    def near_file(self, entry: str) -> str:
        folder = (self.path.parent / entry).parent
        names = (
            [p.name for p in folder.glob("*.y*ml") if not p.name.endswith(".hctest.yaml")] if folder.is_dir() else []
        )
        return suggest(Path(entry).name, names)

    # -- one test ---------------------------------------------------------------------

    def test(self, where: KeyPath, data: Any, step_time: float, profile: str, warmup: int | None) -> RuleTest | None:
        if not isinstance(data, dict):
            self.bad(where, f"a test is a mapping with `name`, `series` and `expect`, found {shown(data)}")
            return None
        self.known_keys(where, data, TEST_KEYS)
        name = data.get("name")
        if not isinstance(name, str) or not name.strip():
            if "name" in data or self.lacks(data, "name", TEST_KEYS):
                at = (*where, "name") if "name" in data else where
                self.bad(at, "a test needs a `name`, as a sentence about behaviour")
            name = f"test {where[-1]}"
        mark = self.document.mark((*where, "name")) or self.document.mark(where)
        test = RuleTest(name.strip(), where, mark.line if mark is not None else 0)
        if test.name in self.names:
            self.bad(
                (*where, "name"), f'"{shorten(test.name)}" is the name of the test at line {self.names[test.name]} too'
            )
        self.names.setdefault(test.name, test.line)
        test.ranks = self.inputs(where, data)
        test.expect = self.expectations((*where, "expect"), data)
        test.only = self.words(where, data, "only", "rule ids")
        test.off = self.words(where, data, "off", "rule ids")
        test.settings = self.value(where, data, "set", dict, "a mapping such as {loss-spike.for: 3}", {})
        test.warmup = self.whole(where, data, "warmup", warmup)
        test.profile = str(self.value(where, data, "profile", str, "a profile name", profile))
        test.step_time = self.duration(where, data, "step_time", step_time)
        test.continue_after_stop = bool(self.value(where, data, "continue_after_stop", bool, "true or false", False))
        test.resume_at = self.steps((*where, "resume_at"), data.get("resume_at")) or ()
        test.xfail = self.xfail(where, data)
        return test

    # -- expectations -----------------------------------------------------------------

    def expectations(self, where: KeyPath, data: dict[str, Any]) -> list[Expected]:
        if "expect" not in data:
            if self.lacks(data, "expect", TEST_KEYS):
                self.bad(where[:-1], "a test needs `expect`", "write `expect: none` if nothing may fire")
            return []
        given = data["expect"]
        if given == "none" or given == []:
            return []
        if not isinstance(given, list):
            self.bad(
                where,
                "`expect` is `none` or a list of alerts",
                "write expect: [{rule: loss-spike, fires: 302}]",
                key=True,
            )
            return []
        return [made for i, entry in enumerate(given) if (made := self.expected((*where, i), entry)) is not None]

    def expected(self, where: KeyPath, entry: Any) -> Expected | None:
        if isinstance(entry, str):
            entry = {"rule": entry}
        if not isinstance(entry, dict):
            self.bad(where, f"an expected alert is a mapping with `rule`, found {shown(entry)}")
            return None
        self.known_keys(where, entry, EXPECT_KEYS)
        rule = entry.get("rule")
        if not isinstance(rule, str):
            if "rule" in entry or self.lacks(entry, "rule", EXPECT_KEYS):
                self.bad(where, "an expected alert needs `rule`", "write {rule: loss-spike}")
            return None
        severity = entry.get("severity")
        if severity is not None and severity not in ("info", "warning", "error"):
            self.bad(
                (*where, "severity"),
                f"{shown(severity)} is not one of info, warning, error",
                suggest(str(severity), ("info", "warning", "error")),
            )
        fires = self.steps((*where, "fires"), entry.get("fires"))
        clears = self.steps((*where, "clears"), entry.get("clears"))
        if clears is not None and len(clears) > max(1, len(fires or ())):
            self.bad((*where, "clears"), "more ends than beginnings; list as many steps in `fires`")
        return Expected(
            rule=rule,
            where=where,
            fires=fires,
            clears=clears,
            then=self.words(where, entry, "then", "action names") if "then" in entry else None,
            series=self.value(where, entry, "series", str, "a series such as grad_norm[encoder.weight]", None),
            count=self.whole(where, entry, "count", None),
            severity=severity,
            message=self.value(where, entry, "message", str, "a part of the message, or a glob", None),
            rank=self.whole(where, entry, "rank", None),
            explained_by=self.value(where, entry, "explained_by", str, "a rule id", None),
        )

    def xfail(self, where: KeyPath, data: dict[str, Any]) -> Xfail | None:
        given = data.get("xfail")
        at = (*where, "xfail")
        if given is None or given is False:
            return None
        if isinstance(given, str) and given.strip():
            return Xfail(given)
        if isinstance(given, dict):
            self.known_keys(at, given, ("reason", "strict"))
            reason = self.value(at, given, "reason", str, "a sentence", "")
            if reason:
                return Xfail(str(reason), bool(self.value(at, given, "strict", bool, "true or false", True)))
        self.bad(at, "`xfail` needs a reason", "write `xfail: needs a trend condition`", key=True)
        return None
