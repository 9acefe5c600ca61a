"""Reads ``*.hctest.yaml``: every mistake of the file at once, each with line and column."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from healthcheck.dispatch import suggest
from healthcheck.errors import Problem
from healthcheck.rulelang.document import Document, KeyPath
from healthcheck.rulelang.loader import load_file
from healthcheck.rulelang.quantities import QuantityError, parse_duration, shorten
from healthcheck.ruletests.model import (
    DEFAULT_STEP_TIME,
    FORMAT_KEY,
    FORMAT_VERSION,
    Expected,
    RuleTest,
    RuleTestFile,
    Source,
    Xfail,
)
from healthcheck.ruletests.notation import NotationError, Piece, parse_series

FILE_KEYS = (FORMAT_KEY, "rules", "profile", "step_time", "warmup", "tests")
TEST_KEYS = (
    "name",
    "series",
    "ranks",
    "expect",
    "only",
    "off",
    "set",
    "warmup",
    "profile",
    "step_time",
    "continue_after_stop",
    "resume_at",
    "xfail",
)
EXPECT_KEYS = (
    "rule",
    "fires",
    "clears",
    "then",
    "series",
    "count",
    "severity",
    "message",
    "rank",
    "explained_by",
)
SERIES_KEYS = ("file", "metric")
SYNONYMS = {
    "rule_files": "rules",
    "input_series": "series",
    "record": "series",
    "interval": "step_time",
    "alerts": "expect",
    "expected": "expect",
    "description": "name",
    "title": "name",
    "skip": "xfail",
    "alert": "rule",
    "id": "rule",
    "at": "fires",
    "step": "fires",
    "steps": "fires",
    "actions": "then",
    "level": "severity",
    "resume": "resume_at",
}
"""Words of other tools -> ours."""


def load_tests(path: Path, *, shown: str = "") -> tuple[RuleTestFile, list[Problem]]:
    """Read one file: what could be understood, and all mistakes that show without the rules.

    :param shown: how messages call it.
    """
    reader = _Reader(load_file(path, shown=shown), path)
    return reader.file(), reader.problems


class _Reader:
    """Walks one document; collects problems instead of raising."""

    def __init__(self, document: Document, path: Path) -> None:
        self.document = document
        self.path = path
        self.problems: list[Problem] = list(document.problems)
        self.names: dict[str, int] = {}

    def bad(
        self, where: KeyPath, message: str, suggestion: str = "", *, slug: str = "value", key: bool = False
    ) -> None:
        self.problems.append(self.document.problem(where, slug, message, key=key, suggestion=suggestion))

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
                self.bad(where, f"`rules` holds file or pack names, found {_shown(entry)}")
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
            self.bad(where, f"a test is a mapping with `name`, `series` and `expect`, found {_shown(data)}")
            return None
        self.known_keys(where, data, TEST_KEYS)
        name = data.get("name")
        if not isinstance(name, str) or not name.strip():
            self.bad(
                (*where, "name") if "name" in data else where, "a test needs a `name`, as a sentence about behaviour"
            )
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

    def inputs(self, where: KeyPath, data: dict[str, Any]) -> dict[int, list[Source]]:
        if "ranks" not in data:
            if "series" not in data:
                self.bad(where, "a test needs `series`", 'write for instance series: {loss: "2.0~0.05 x300"}')
                return {}
            return {0: self.series((*where, "series"), data["series"])}
        shared = self.series((*where, "series"), data["series"]) if "series" in data else []
        given = data["ranks"]
        if not isinstance(given, dict) or not given:
            self.bad((*where, "ranks"), "`ranks` maps rank numbers to series", "write `ranks: {0: {...}, 1: {...}}`")
            return {}
        found = {}
        for rank, entry in given.items():
            at = (*where, "ranks", rank)
            if not rank.isdigit():
                self.bad(at, f'"{shorten(rank)}" is not a rank; ranks count from 0', key=True)
                continue
            own = self.series(at, entry)
            names = {source.series for source in own}
            found[int(rank)] = [*(s for s in shared if s.series not in names), *own]
        return dict(sorted(found.items()))

    def series(self, where: KeyPath, data: Any) -> list[Source]:
        """A map of series, or a whole record (`runs/7`, `{file: runs/7}`)."""
        if isinstance(data, str):
            return [Source("", where, record=self.recorded(where, data))]
        if not isinstance(data, dict) or not data:
            self.bad(where, 'series are a mapping such as {loss: "2.0 x300"}, or the path of a record', key=True)
            return []
        if "file" in data and set(data) <= set(SERIES_KEYS):
            return [self.from_record("", where, data)]
        found = []
        for name, value in data.items():
            at = (*where, name)
            if isinstance(value, dict):
                self.known_keys(at, value, SERIES_KEYS)
                found.append(self.from_record(name, at, value))
            else:
                found.append(Source(name, at, tuple(self.pieces(at, value))))
        return found

    def from_record(self, name: str, where: KeyPath, data: dict[str, Any]) -> Source:
        file = data.get("file")
        if not isinstance(file, str):
            self.bad(where, "a recorded series needs `file`", "write {file: run.jsonl, metric: loss}")
            return Source(name, where)
        metric = self.value(where, data, "metric", str, "the name of a series in the record", name)
        return Source(name or str(metric), where, record=self.recorded((*where, "file"), file), metric=str(metric))

    def recorded(self, where: KeyPath, name: str) -> Path:
        path = self.path.parent / name
        if not path.exists():
            what = (
                "is no record beside this file" if "," not in name and " " not in name else "is not a mapping of series"
            )
            self.bad(where, f'"{shorten(name)}" {what}', slug="no-such-file")
        return path

    def pieces(self, where: KeyPath, value: Any) -> list[Piece]:
        if isinstance(value, list):
            return [piece for i, item in enumerate(value) for piece in self.pieces((*where, i), item)]
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            self.bad(where, f'a series is text such as "2.0~0.05 x300, nan", found {_shown(value)}', slug="series")
            return []
        text = value if isinstance(value, str) else repr(value)
        try:
            return parse_series(text)
        except NotationError as error:
            self.problems.append(
                self.document.problem(
                    where, "series", str(error), offset=error.start, width=error.width, suggestion=error.suggestion
                )
            )
            return []

    # -- expectations -----------------------------------------------------------------

    def expectations(self, where: KeyPath, data: dict[str, Any]) -> list[Expected]:
        if "expect" not in data:
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
            self.bad(where, f"an expected alert is a mapping with `rule`, found {_shown(entry)}")
            return None
        self.known_keys(where, entry, EXPECT_KEYS)
        rule = entry.get("rule")
        if not isinstance(rule, str):
            self.bad(where, "an expected alert needs `rule`", "write {rule: loss-spike}")
            return None
        severity = entry.get("severity")
        if severity is not None and severity not in ("info", "warning", "error"):
            self.bad(
                (*where, "severity"),
                f"{_shown(severity)} is not one of info, warning, error",
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

    # -- values -----------------------------------------------------------------------

    def known_keys(self, where: KeyPath, data: dict[str, Any], known: tuple[str, ...]) -> None:
        for key in data:
            if key not in known:
                word = SYNONYMS.get(key, "")
                hint = f'here it is called "{word}"' if word in known else suggest(key, known)
                self.bad(
                    (*where, key),
                    f'unknown key "{shorten(key)}"',
                    hint or f"known: {', '.join(known)}",
                    slug="unknown-key",
                    key=True,
                )

    def value(self, where: KeyPath, data: dict[str, Any], key: str, kind: type, wanted: str, default: Any) -> Any:
        found = data.get(key, default)
        if key in data and not isinstance(found, kind):
            self.bad((*where, key), f"`{key}` is {wanted}, found {_shown(found)}")
            return default
        return found

    def whole(self, where: KeyPath, data: dict[str, Any], key: str, default: int | None) -> int | None:
        found = data.get(key, default)
        if key in data and (isinstance(found, bool) or not isinstance(found, int) or found < 0):
            self.bad((*where, key), f"`{key}` is a whole number, found {_shown(found)}")
            return default
        return found

    def steps(self, where: KeyPath, given: Any) -> tuple[int, ...] | None:
        if given is None:
            return None
        listed = given if isinstance(given, list) else [given]
        if not listed or any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in listed):
            self.bad(where, f"`{where[-1]}` is a step or a list of steps, counted from 1; found {_shown(given)}")
            return None
        return tuple(listed)

    def words(self, where: KeyPath, data: dict[str, Any], key: str, wanted: str) -> tuple[str, ...]:
        given = data.get(key, [])
        listed = given if isinstance(given, list) else [given]
        if any(not isinstance(word, str) for word in listed):
            self.bad((*where, key), f"`{key}` is a list of {wanted}, found {_shown(given)}")
            return ()
        return tuple(listed)

    def duration(self, where: KeyPath, data: dict[str, Any], key: str, default: float) -> float:
        if key not in data:
            return default
        return self._try((*where, key), lambda: parse_duration(data[key]), default)

    def _try(self, where: KeyPath, read: Callable[[], float], default: float) -> float:
        try:
            return read()
        except QuantityError as error:
            self.bad(where, str(error))
            return default


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    return f'"{shorten(str(value))}"' if isinstance(value, str) else str(value).lower()
