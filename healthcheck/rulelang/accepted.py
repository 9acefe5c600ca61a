"""Known alerts: ``healthcheck-accepted.yaml``, written by ``healthcheck accept``.

An accepted alert is still judged, recorded and shown, but does not count for the exit code: an old
project can switch healthcheck on, and only what is new fails. Unlike a mute it has no span of
steps, names series, and its actions run. One entry::

    version: 1
    accepted:
      - rule: no-gradient             # or one cause of it: rule.cause
        series: "grad_norm[head.*]"     # glob; left out: every series of the rule
        script: train_rl.py             # glob; left out: every script
        reason: frozen on purpose since March
        since: 2026-11-27

Entries that matched nothing in a run are reported, as unused ignores are.
"""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from healthcheck.core.errors import RuleFileError
from healthcheck.rulelang.loader import load_file
from healthcheck.rulelang.rule import Origin, named
from healthcheck.rulelang.validation import Format, Validator

FILE_NAME = "healthcheck-accepted.yaml"

_TEXT = {"type": "string", "minLength": 1}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["version"],
    "additionalProperties": False,
    "properties": {
        "version": {"enum": [1]},
        "accepted": {
            "type": ["array", "null"],
            "errorMessage": "expected a list of {rule, reason}",
            "items": {
                "type": "object",
                "required": ["rule", "reason"],
                "additionalProperties": False,
                "properties": {
                    key: {**_TEXT, "errorMessage": f"`{key}` is text"}
                    for key in ("rule", "series", "script", "reason", "since")
                },
                "errorMessage": "expected {rule: ..., reason: ...}",
            },
        },
    },
}

HEADER = """\
# Alerts that are known and accepted; they are shown and do not fail a run. Written by `healthcheck accept`.
version: 1
accepted:
"""


NOWHERE = Origin(FILE_NAME)


class AcceptedFormat(Format):
    """The format of ``healthcheck-accepted.yaml``."""

    files = "accepted alerts"


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One entry."""

    rule: str
    reason: str
    series: str = "*"
    script: str = "*"
    since: str = ""
    origin: Origin = NOWHERE

    def covers(self, rule: str, series: str, script: str = "") -> bool:
        """Whether what a rule or cause (``rule.cause``) finds in this series is accepted in this script, given by path."""
        return (
            named(self.rule, rule)
            and _matches(self.series, series)
            and (self.script == "*" or _matches(self.script, script) or _matches(self.script, Path(script).name))
        )


@dataclass(slots=True)
class Accepted:
    """All entries of one file, and which of them were needed."""

    entries: list[Acceptance] = field(default_factory=list)
    used: set[int] = field(default_factory=set)

    def reason(self, rule: str, series: Iterable[str], script: str = "") -> str:
        """Why an alert is accepted; empty if some series of it is not."""
        reasons: dict[str, None] = {}
        hits: set[int] = set()
        for name in series:
            found = next((i for i, entry in enumerate(self.entries) if entry.covers(rule, name, script)), None)
            if found is None:
                return ""
            hits.add(found)
            reasons[self.entries[found].reason] = None
        self.used |= hits
        return "; ".join(reasons)

    def unused(self, script: str = "") -> list[Acceptance]:
        """Entries for this script that no alert needed: fixed, or mistyped."""
        return [
            entry
            for i, entry in enumerate(self.entries)
            if i not in self.used and (not script or entry.covers(entry.rule, entry.series, script))
        ]


def load_accepted(path: Path) -> Accepted:
    """Read the file. Raises ``RuleFileError`` with all its mistakes."""
    document = load_file(path)
    problems = document.problems + Validator(AcceptedFormat(SCHEMA)).check(document)
    if problems:
        raise RuleFileError(problems)
    return Accepted(
        [
            Acceptance(**entry, origin=document.origin(("accepted", i)))
            for i, entry in enumerate(document.data.get("accepted") or ())
        ]
    )


def find_accepted(start: Path) -> Path | None:
    """The nearest file, from a folder up to the root of its repository."""
    for folder in (start, *start.parents):
        if (folder / FILE_NAME).is_file():
            return folder / FILE_NAME
        if (folder / ".git").exists():
            break
    return None


def add_accepted(path: Path, entries: Iterable[Acceptance]) -> list[Acceptance]:
    """Append entries that are not covered yet; returns those. The write is atomic, comments stay."""
    known = load_accepted(path).entries if path.is_file() else []
    added: list[Acceptance] = []
    for entry in entries:
        if entry not in added and not any(k.covers(entry.rule, entry.series, entry.script) for k in [*known, *added]):
            added.append(entry)
    if added:
        text = path.read_text(encoding="utf-8") if known or path.is_file() else HEADER
        # Appended as text, not dumped as YAML: what people wrote between the entries stays.
        text = text.replace("accepted: []", "accepted:").rstrip("\n") + "\n" + "".join(map(_written, added))
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return added


def _written(entry: Acceptance) -> str:
    lines = [f"  - rule: {_quoted(entry.rule)}"]
    if entry.series != "*":
        lines.append(f"    series: {_quoted(entry.series)}")
    if entry.script != "*":
        lines.append(f"    script: {_quoted(entry.script)}")
    lines.append(f"    reason: {_quoted(entry.reason)}")
    if entry.since:
        lines.append(f"    since: {_quoted(entry.since)}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """JSON strings are YAML strings, whatever is in them."""
    return json.dumps(text, ensure_ascii=False)


def _matches(pattern: str, text: str) -> bool:
    """A glob in which ``[`` is a plain character, since series names are full of brackets."""
    return pattern == text or fnmatch.fnmatchcase(text, pattern.replace("[", "[[]"))
