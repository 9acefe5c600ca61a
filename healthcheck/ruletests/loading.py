"""Reads ``*.hctest.yaml``: what it says as types, and every mistake of the file at once, each with line and column."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from healthcheck.core.errors import Problem
from healthcheck.core.text import one_line, suggest
from healthcheck.rulelang.document import Document, KeyPath
from healthcheck.rulelang.loader import load_file
from healthcheck.rulelang.quantities import QuantityError, parse_duration
from healthcheck.rulelang.validation import Format, Validator
from healthcheck.ruletests.notation import NotationError, Piece, parse_series

FORMAT_KEY = "healthcheck_tests"
SUFFIX = ".hctest.yaml"
DEFAULT_STEP_TIME = 1.0
"""Seconds of virtual time per step."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where one series comes from: the notation, or a recorded run."""

    series: str
    """``loss``, ``grad_norm[encoder.weight]``; empty for a whole record."""
    where: KeyPath
    pieces: tuple[Piece, ...] = ()
    record: Path | None = None
    metric: str = ""
    """Name of the series within the record."""


@dataclass(frozen=True, slots=True)
class Expected:
    """One entry of ``expect``. What is None is not compared."""

    rule: str
    where: KeyPath
    fires: tuple[int, ...] | None = None
    """Steps at which an episode begins; None: at least one, anywhere."""
    clears: tuple[int, ...] | None = None
    then: tuple[str, ...] | None = None
    """Names of the actions that run in an episode, in any order."""
    series: str | None = None
    count: int | None = None
    """How many series breached at once."""
    severity: str | None = None
    message: str | None = None
    """A part of the message, or a glob."""
    rank: int | None = None
    explained_by: str | None = None
    also: tuple[str, ...] | None = None
    """Names of the other causes that have fired in the episode, in any order."""


@dataclass(frozen=True, slots=True)
class Xfail:
    """The test is known to fail. Strict: passing is a failure too, so that nobody forgets it here."""

    reason: str
    strict: bool = True


@dataclass(slots=True)
class RuleTest:
    """One entry of ``tests``."""

    name: str
    where: KeyPath
    line: int
    ranks: dict[int, list[Source]] = field(default_factory=dict)
    """Rank -> its series; one rank unless the test says ``ranks:``."""
    expect: list[Expected] = field(default_factory=list)
    """Empty for ``expect: none``."""
    only: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """``set``: leaf path -> value, as on the command line."""
    warmup: int | None = None
    profile: str = ""
    step_time: float = DEFAULT_STEP_TIME
    """Seconds."""
    continue_after_stop: bool = False
    resume_at: tuple[int, ...] = ()
    """Steps after which the engine is saved and made anew."""
    xfail: Xfail | None = None


@dataclass(slots=True)
class RuleTestFile:
    """One ``*.hctest.yaml`` file."""

    path: Path
    document: Document
    rules: tuple[Any, ...] = ()
    """Paths (absolute), pack names or mappings, in the order of the file."""
    tests: list[RuleTest] = field(default_factory=list)


# --------------------------------------------------------------------------- shape


def _map(required: Mapping[str, Any], properties: Mapping[str, Any], otherwise: Any = "") -> dict[str, Any]:
    """A map with these keys and no others; ``required`` has the words for each key that is missing."""
    return {
        "type": "object",
        "required": list(required),
        "additionalProperties": False,
        "properties": properties,
        "errorMessage": {"type": otherwise, "required": required},
    }


def _text(words: Any, **more: Any) -> dict[str, Any]:
    return {"type": "string", **more, "errorMessage": words}


def _sentence(words: Any) -> dict[str, Any]:
    return _text(words, pattern=r"\S")


def _whole(key: str) -> dict[str, Any]:
    text = f"`{key}` is a whole number"
    return {"type": "integer", "minimum": 0, "errorMessage": {"type": text, "minimum": text}}


def _names(key: str, what: str) -> dict[str, Any]:
    text = f"`{key}` is a list of {what}"
    return {"type": ["array", "string"], "items": _text(text), "errorMessage": text}


def _steps(key: str) -> dict[str, Any]:
    text = f"`{key}` is a step or a list of steps, counted from 1"
    step = {"type": "integer", "minimum": 1, "errorMessage": {"type": text, "minimum": text, "minItems": text}}
    return {**step, "type": ["integer", "array", "null"], "minItems": 1, "items": step}


_PROFILE = _text("`profile` is a profile name")
_SWITCH = {"type": "boolean"}
_DURATION = {"type": ["string", "number"], "errorMessage": "expected a duration, such as 30s"}
_NOTATION = 'a series is text such as "2.0~0.05 x300, nan"'
_SERIES = {
    "type": ["object", "string"],
    "minProperties": 1,
    "additionalProperties": {
        "type": ["string", "number", "array", "object"],
        "items": {"type": ["string", "number", "array"], "errorMessage": _NOTATION},
        "if": {"type": "object"},
        "then": _map(
            {"file": ["a recorded series needs `file`", "write {file: run.jsonl, metric: loss}"]},
            {"file": _text("`file` is the path of a record"), "metric": _text("`metric` is a series of the record")},
        ),
        "errorMessage": _NOTATION,
    },
    "errorMessage": 'series are a mapping such as {loss: "2.0 x300"}, or the path of a record',
}
_EXPECTED_IS = "an expected alert is a mapping with `rule`"
_EXPECTED = {
    "type": ["object", "string"],
    "if": {"type": "object"},
    "then": _map(
        {"rule": ["an expected alert needs `rule`", "write {rule: loss-spike}"]},
        {
            "rule": _text("`rule` is a rule id, or rule.cause"),
            "fires": _steps("fires"),
            "clears": _steps("clears"),
            "then": _names("then", "action names"),
            "series": _text("`series` is a series such as grad_norm[encoder.weight]"),
            "count": _whole("count"),
            "severity": {"enum": ["info", "warning", "error", None]},
            "message": _text("`message` is a part of the message, or a glob"),
            "rank": _whole("rank"),
            "explained_by": _text("`explained_by` is a rule id"),
            "also": _names("also", "names of causes"),
        },
    ),
    "errorMessage": _EXPECTED_IS,
}
_NAME_WORDS = "a test needs a `name`, as a sentence about behaviour"
_EXPECT_WORDS = ["`expect` is `none` or a list of alerts", "write expect: [{rule: loss-spike, fires: 302}]"]
_XFAIL_WORDS = ["`xfail` needs a reason", "write `xfail: needs a trend condition`"]
_TEST = {
    **_map(
        {"name": _NAME_WORDS, "expect": ["a test needs `expect`", "write `expect: none` if nothing may fire"]},
        {
            "name": _sentence(_NAME_WORDS),
            "series": _SERIES,
            "ranks": {
                "type": "object",
                "minProperties": 1,
                "propertyNames": {"pattern": "^[0-9]+$", "errorMessage": "a rank is a number, counted from 0"},
                "additionalProperties": _SERIES,
                "errorMessage": ["`ranks` maps rank numbers to series", "write `ranks: {0: {...}, 1: {...}}`"],
            },
            "expect": {
                "type": ["array", "string"],
                "items": _EXPECTED,
                "if": {"type": "string"},
                "then": {"enum": ["none"], "errorMessage": {"enum": _EXPECT_WORDS}},
                "errorMessage": _EXPECT_WORDS,
            },
            "only": _names("only", "rule ids"),
            "off": _names("off", "rule ids"),
            "set": {"type": "object", "errorMessage": "`set` is a mapping such as {loss-spike.for: 3}"},
            "warmup": _whole("warmup"),
            "profile": _PROFILE,
            "step_time": _DURATION,
            "continue_after_stop": _SWITCH,
            "resume_at": _steps("resume_at"),
            "xfail": {
                "type": ["string", "object", "boolean", "null"],
                "pattern": r"\S",
                "if": {"type": "object"},
                "then": _map({"reason": _XFAIL_WORDS}, {"reason": _sentence(_XFAIL_WORDS), "strict": _SWITCH}),
                "else": {"not": {"const": True}, "errorMessage": _XFAIL_WORDS},
                "errorMessage": _XFAIL_WORDS,
            },
        },
        "a test is a mapping with `name`, `series` and `expect`",
    ),
    "if": {"required": ["ranks"]},
    "else": {
        "required": ["series"],
        "errorMessage": {
            "required": {"series": ["a test needs `series`", 'write for instance series: {loss: "2.0~0.05 x300"}']}
        },
    },
}
_RULES_WORDS = ["`rules` names the files to test", "write `rules: [team.yaml]`"]
_TESTS_WORDS = "`tests` must be a list with at least one test"
SCHEMA = _map(
    {FORMAT_KEY: "", "rules": _RULES_WORDS, "tests": _TESTS_WORDS},
    {
        FORMAT_KEY: {"enum": [1]},
        "rules": {
            "type": ["array", "string", "object"],
            "minItems": 1,
            "pattern": r"\S",
            "items": {
                "type": ["string", "object"],
                "pattern": r"\S",
                "errorMessage": "`rules` holds file or pack names",
            },
            "errorMessage": _RULES_WORDS,
        },
        "profile": _PROFILE,
        "step_time": _DURATION,
        "warmup": _whole("warmup"),
        "tests": {"type": "array", "minItems": 1, "items": _TEST, "errorMessage": _TESTS_WORDS},
    },
)

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


class RuleTestFormat(Format):
    """The format of ``*.hctest.yaml``."""

    version_key = FORMAT_KEY
    files = "rule tests"

    def level(self, where: KeyPath) -> tuple[str, Mapping[str, str]]:
        """One table for all maps: no word means two things."""
        return "key", SYNONYMS


# --------------------------------------------------------------------------- meaning


def load_tests(path: Path, *, shown: str = "") -> tuple[RuleTestFile, list[Problem]]:
    """Read one file: what could be understood, and all mistakes that show without the rules.

    :param shown: how messages call it.
    """
    document = load_file(path, shown=shown)
    reader = _Reader(document, path)
    return reader.file(), reader.problems


class _Reader:
    """Makes tests of what has the right shape; what means nothing is added to the problems."""

    def __init__(self, document: Document, path: Path) -> None:
        self.document = document
        self.path = path
        self.shape = Validator(RuleTestFormat(SCHEMA))
        self.problems = document.problems + self.shape.check(document)
        self.names: dict[str, int] = {}

    def bad(self, where: KeyPath, message: str, suggestion: str = "", *, slug: str = "bad-value") -> None:
        self.problems.append(self.document.problem(where, slug, message, suggestion=suggestion))

    def good(self, where: KeyPath, data: Any, key: str, default: Any = None) -> Any:
        """The value of a key; the default where it is absent or was refused."""
        return data[key] if key in data and not self.shape.is_bad(self.document, (*where, key)) else default

    def duration(self, where: KeyPath, data: Any, default: float) -> float:
        written = self.good(where, data, "step_time")
        try:
            return default if written is None else parse_duration(written)
        except QuantityError as error:
            self.bad((*where, "step_time"), str(error))
            return default

    def file(self) -> RuleTestFile:
        made = RuleTestFile(self.path, self.document)
        data = self.document.data
        if not isinstance(data, dict):
            return made
        before = len(self.problems)
        rules = tuple(self.rules(_listed(self.good((), data, "rules"))))
        made.rules = rules if len(self.problems) == before else ()  # half of the rules would only raise more errors
        step_time = self.duration((), data, DEFAULT_STEP_TIME)
        profile, warmup = self.good((), data, "profile", ""), self.good((), data, "warmup")
        tests = data.get("tests")
        for index, entry in enumerate(tests if isinstance(tests, list) else ()):
            if isinstance(entry, dict):
                made.tests.append(self.test(("tests", index), entry, step_time, profile, warmup))
        return made

    def rules(self, listed: Iterable[Any]) -> Iterator[Any]:
        for index, entry in enumerate(listed):
            where: KeyPath = ("rules", index) if isinstance(self.document.data["rules"], list) else ("rules",)
            if isinstance(entry, dict) or (":" in entry and not entry.endswith((".yaml", ".yml"))):
                yield entry  # rules in place, or a pack: healthcheck:recommended@1
                continue
            file = self.path.parent / entry
            if not os.path.isfile(file):
                there = file.parent.glob("*.y*ml") if os.path.isdir(file.parent) else ()
                near = suggest(file.name, [p.name for p in there if not p.name.endswith(SUFFIX)])
                text = f"there is no file {one_line(entry)} beside this one"
                self.bad(where, text, near, slug="no-such-file")
            yield file.resolve()

    def test(
        self, where: KeyPath, data: dict[str, Any], step_time: float, profile: str, warmup: int | None
    ) -> RuleTest:
        name = str(self.good(where, data, "name", f"test {where[-1]}")).strip()
        mark = self.document.mark((*where, "name"))
        line = mark.line if mark is not None else 0
        if name in self.names:
            text = f'"{one_line(name)}" is the name of the test at line {self.names[name]} too'
            self.bad((*where, "name"), text)
        self.names.setdefault(name, line)
        return RuleTest(
            name,
            where,
            line,
            ranks=self.ranks(where, data),
            expect=self.expectations((*where, "expect"), data.get("expect")),
            only=tuple(_listed(self.good(where, data, "only"))),
            off=tuple(_listed(self.good(where, data, "off"))),
            settings=self.good(where, data, "set", {}),
            warmup=self.good(where, data, "warmup", warmup),
            profile=self.good(where, data, "profile", profile),
            step_time=self.duration(where, data, step_time),
            continue_after_stop=self.good(where, data, "continue_after_stop", False),
            resume_at=tuple(_listed(self.good(where, data, "resume_at"))),
            xfail=_xfail(self.good(where, data, "xfail")),
        )

    # -- series -----------------------------------------------------------------------

    def ranks(self, where: KeyPath, data: dict[str, Any]) -> dict[int, list[Source]]:
        """Rank -> its series: those of `series`, and those of `ranks` over them."""
        shared = self.series((*where, "series"), data["series"]) if "series" in data else []
        given = data.get("ranks")
        if not isinstance(given, dict):
            return {0: shared} if shared else {}
        found = {}
        for rank, entry in given.items():
            if rank.isdigit():
                own = self.series((*where, "ranks", rank), entry)
                names = {source.series for source in own}
                found[int(rank)] = [*(s for s in shared if s.series not in names), *own]
        return dict(sorted(found.items()))

    def series(self, where: KeyPath, data: Any) -> list[Source]:
        """A map of series, or a whole record (`runs/7`, `{file: runs/7}`)."""
        if isinstance(data, str):
            return [Source("", where, record=self.record(where, data))]
        if not isinstance(data, dict):
            return []
        if "file" in data and set(data) <= {"file", "metric"}:
            if isinstance(data["file"], str):
                return [self.recorded("", where, data)]
            self.bad(where, "a recorded series needs `file`", "write {file: run.jsonl, metric: loss}")
            return []
        found = []
        for name in data:
            value = self.good(where, data, name)
            if isinstance(value, dict):
                found.append(self.recorded(name, (*where, name), value))
            elif value is not None:
                found.append(Source(name, (*where, name), tuple(self.pieces((*where, name), value))))
        return found

    def recorded(self, name: str, where: KeyPath, data: dict[str, str]) -> Source:
        metric = str(data.get("metric", name))
        return Source(name or metric, where, record=self.record((*where, "file"), data["file"]), metric=metric)

    def record(self, where: KeyPath, name: str) -> Path:
        path = self.path.parent / name
        if not os.path.exists(path):
            is_path = "," not in name and " " not in name
            what = "is not a record beside this file" if is_path else "is not a mapping of series"
            self.bad(where, f'"{one_line(name)}" {what}', slug="no-such-file")
        return path

    def pieces(self, where: KeyPath, value: Any) -> Iterator[Piece]:
        if isinstance(value, list):
            for i, item in enumerate(value):
                yield from self.pieces((*where, i), item)
            return
        try:
            yield from parse_series(value if isinstance(value, str) else repr(value))
        except NotationError as error:
            self.problems.append(
                self.document.problem(
                    where, "series", str(error), offset=error.start, width=error.width, suggestion=error.suggestion
                )
            )

    # -- expectations -----------------------------------------------------------------

    def expectations(self, where: KeyPath, given: Any) -> list[Expected]:
        found = []
        for index, written in enumerate(given if isinstance(given, list) else ()):
            entry = {"rule": written} if isinstance(written, str) else written
            at = (*where, index)
            if isinstance(entry, dict) and isinstance(entry.get("rule"), str):
                found.append(self.expected(at, entry))
        return found

    def expected(self, where: KeyPath, entry: dict[str, Any]) -> Expected:
        def steps(key: str) -> tuple[int, ...] | None:
            written = self.good(where, entry, key)
            return None if written is None else tuple(_listed(written))

        fires, clears = steps("fires"), steps("clears")
        if clears is not None and len(clears) > max(1, len(fires or ())):
            self.bad((*where, "clears"), "more ends than beginnings; list as many steps in `fires`")
        then = self.good(where, entry, "then")
        also = self.good(where, entry, "also")
        return Expected(
            rule=entry["rule"],
            where=where,
            fires=fires,
            clears=clears,
            then=None if then is None else tuple(_listed(then)),
            also=None if also is None else tuple(_listed(also)),
            **{
                key: self.good(where, entry, key)
                for key in ("series", "count", "severity", "message", "rank", "explained_by")
            },
        )


def _listed(value: Any) -> list[Any]:
    """One thing, or several."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _xfail(given: Any) -> Xfail | None:
    if isinstance(given, dict):
        return Xfail(given["reason"], given.get("strict", True))
    return Xfail(given) if isinstance(given, str) else None
