"""``--report KIND=PATH``: files (and annotations) for CI, all made from the content of ``report.json``.

One table says which kinds there are; ``run``, ``replay`` and pytest use the same functions. A
plugin adds a kind of its own by registering a report that has ``render(reports) -> str``.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import UsageError
from healthcheck.core.text import suggest
from healthcheck.extend.guard import describe, passes_on, place_of
from healthcheck.record.runs import load_run
from healthcheck.reports.console import Stderr

if TYPE_CHECKING:
    from healthcheck.reports.pagedata import PageData
    from healthcheck.run.session import Session

Reports = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class FileKind:
    """One kind of report: its text, and what else it does."""

    render: Callable[[Reports], str]
    """The text of the file, from one report (live run) or several (replay, pytest)."""
    default_path: Callable[[], str] | None = None
    """Where the file goes when no path is given; None: a path must be given."""
    append: bool = False
    """Add to the file instead of replacing it."""
    lines: Callable[[Reports, Path], list[str]] | None = None
    """Lines for stderr, from the reports and the folder in which the run began."""
    with_record: Callable[[Reports, PageData | None], str] | None = None
    """The text where the record of the one run is at hand, for kinds that draw it."""


def _junit(reports: Reports) -> str:
    from healthcheck.reports import ci

    return ci.junit_xml(reports)


def _sarif(reports: Reports) -> str:
    from healthcheck.reports import ci

    return ci.sarif(reports)


def _summary(reports: Reports) -> str:
    from healthcheck.reports import ci

    return ci.job_summary(reports)


def _annotations(reports: Reports, folder: Path) -> list[str]:
    from healthcheck.reports import ci

    return ci.workflow_commands(reports, folder)


def _page(reports: Reports, data: PageData | None = None) -> str:
    from healthcheck.reports.page import page_html

    return page_html(reports, data)


# Imported when somebody asks for one: every run reads this table before the script's first line.
KINDS: dict[str, FileKind] = {
    "json": FileKind(lambda reports: _json(reports)),
    "junit": FileKind(_junit),
    "sarif": FileKind(_sarif),
    "html": FileKind(_page, with_record=_page),
    "github": FileKind(
        _summary,
        default_path=lambda: os.environ.get("GITHUB_STEP_SUMMARY", ""),
        append=True,
        lines=_annotations,
    ),
}


def kinds_of(plugin_reports: Mapping[str, Any] | None = None) -> dict[str, FileKind]:
    """All kinds: ours, and those that plugins add (``Registry.reports`` with ``render``)."""
    found = dict(KINDS)
    for name, report in (plugin_reports or {}).items():
        render = getattr(report, "render", None)
        if callable(render):
            found.setdefault(name, FileKind(render))
    return found


def parse_reports(
    given: Any, kinds: Mapping[str, FileKind] | None = None, *, option: str = "--report"
) -> dict[str, str]:
    """``["json=hc.json", "github"]`` or a mapping as kind -> path (empty where the kind knows its own).

    Raises ``UsageError`` with all mistakes: an unknown kind (with a suggestion), a kind given twice,
    a missing path.
    """
    found, wrong = read_reports(given, kinds, example=f"{option} ")
    if wrong:
        raise UsageError("\n".join(f"{option}: {problem}" for _, problem in wrong))
    return found


def read_reports(
    given: Any, kinds: Mapping[str, FileKind] | None = None, *, example: str = ""
) -> tuple[dict[str, str], list[tuple[int, str]]]:
    """What :func:`parse_reports` returns, and every mistake with the index of its entry.

    :param example: what stands before an entry where it is written, for the examples in messages.
    """
    table = KINDS if kinds is None else kinds
    pairs = (
        given.items() if isinstance(given, Mapping) else map(_pair, [given] if isinstance(given, str) else given or ())
    )
    found: dict[str, str] = {}
    wrong: list[tuple[int, str]] = []
    for index, (kind, path) in enumerate(pairs):
        kind, path = str(kind).strip(), str(path or "").strip()
        known = table.get(kind)
        if known is None:
            hint = suggest(kind, table)
            wrong.append(
                (index, f'there is no report "{kind}"; {hint + " " if hint else ""}there are: {", ".join(table)}')
            )
        elif kind in found:
            wrong.append((index, f"{kind} is given twice ({found[kind]} and {path})"))
        elif not path and known.default_path is None:
            wrong.append((index, f"{kind} needs a path, for instance {example}{kind}=healthcheck.{_suffix(kind)}"))
        else:
            found[kind] = path
    return found, wrong


def write_reports(
    kind_paths: Mapping[str, str],
    reports: Mapping[str, Any] | Reports,
    *,
    kinds: Mapping[str, FileKind] | None = None,
    folder: Path | None = None,
    record: Callable[[], PageData | None] | None = None,
) -> list[str]:
    """Write every kind that was asked for; returns one sentence for each that could not be written.

    :param kind_paths: what :func:`parse_reports` made of the option.
    :param reports: one report (a mapping; JSON is then an object) or several (JSON is then a list).
    :param folder: relative paths start here; default the working directory.
    :param record: reads the record of the one run, where it has one; called only for kinds that draw it.
    """
    table = KINDS if kinds is None else kinds
    folder = folder if folder is not None else Path.cwd()
    listed: Reports = [reports] if isinstance(reports, Mapping) else list(reports)
    problems = []
    for kind, named in kind_paths.items():
        known = table[kind]
        if known.lines is not None:
            Stderr().write(known.lines(listed, folder), commands=True)
        path = named or (known.default_path() if known.default_path is not None else "")
        if not path:
            continue
        try:
            if kind == "json":
                text = _json(reports)
            elif record is not None and known.with_record is not None:
                text = known.with_record(listed, record())
            else:
                text = known.render(listed)
            _write(folder / Path(path).expanduser(), text, append=known.append, tree=folder)
        except OSError as error:
            problems.append(f"report {kind}={path} could not be written: {error.strerror}")
        except BaseException as error:
            if kind in KINDS or passes_on(error):
                raise
            problems.append(f"report {kind}={path} could not be made: {describe(error)} ({place_of(error)})")
    return problems


class FileReports:
    """Writes the reports that the setting ``report`` names, at the end of a live run; rank 0 only."""

    name = "files"

    def __init__(self) -> None:
        self._session: Session | None = None
        self._folder = Path()
        self._wanted: dict[str, str] = {}
        self._kinds: dict[str, FileKind] = {}

    def start(self, session: Session) -> None:
        self._session = session
        self._folder = Path.cwd()  # the script may change its directory
        if session.info.speaks:
            self._kinds = kinds_of(session.host.registry.reports)
            self._wanted = parse_reports(session.settings.get("report"), self._kinds)

    def finish(self, report: dict[str, Any]) -> None:
        if self._session is None:
            return
        problems = write_reports(
            self._wanted, report, kinds=self._kinds, folder=self._folder, record=lambda: self._recorded(report)
        )
        for problem in problems:
            self._session.note(problem)

    def _recorded(self, report: Mapping[str, Any]) -> PageData | None:
        """Without judging anything once more: the process that trains is not to wait for that at its end."""
        from healthcheck.reports.pagedata import page_data

        assert self._session is not None
        folder = self._session.info.run_dir
        units = self._session.host.registry.units()
        return page_data(load_run(folder), report["alerts"], units, report=report) if folder is not None else None


def _pair(item: Any) -> tuple[str, str]:
    kind, _, path = str(item).partition("=")
    return kind, path


def _suffix(kind: str) -> str:
    return {"json": "json", "junit": "xml", "html": "html", "sarif": "sarif"}.get(kind, "txt")


def _json(reports: Mapping[str, Any] | Reports) -> str:
    value = reports if isinstance(reports, Mapping) else list(reports)
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def _write(path: Path, text: str, *, append: bool, tree: Path) -> None:
    """Write a file as a whole. What stands there stays what it is: a link still points, a device is still one.

    :param tree: the working directory, in which folders are made.
    """
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        if not path.is_relative_to(os.path.realpath(tree)):  # a typo would make a tree somewhere else
            raise FileNotFoundError(errno.ENOENT, f"there is no folder {path.parent}; make it first")
        path.parent.mkdir(parents=True)
    if append or (path.exists() and not path.is_file()):
        # A pipe that nobody reads must not hold up the end of a run.
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else 0) | getattr(os, "O_NONBLOCK", 0)
        with open(os.open(path, flags, 0o666), "w", encoding="utf-8") as file:
            file.write(text)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)  # a reader sees the old file or the new one, never a half
    finally:
        temporary.unlink(missing_ok=True)
