"""What a rule-test file says, as types. How it is read: :mod:`healthcheck.ruletests.loading`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from healthcheck.rulelang.document import Document, KeyPath
from healthcheck.ruletests.notation import Piece

FORMAT_KEY = "healthcheck_tests"
FORMAT_VERSION = 1
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
    continue_after_stop: bool = False
    resume_at: tuple[int, ...] = ()
    xfail: Xfail | None = None


@dataclass(slots=True)
class RuleTestFile:
    """One ``*.hctest.yaml`` file."""

    path: Path
    document: Document
    rules: tuple[Any, ...] = ()
    """Paths (absolute), pack names or mappings, in the order of the file."""
    tests: list[RuleTest] = field(default_factory=list)
