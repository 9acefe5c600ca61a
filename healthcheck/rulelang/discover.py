"""Which rules a run uses when nobody says so, and where its settings come from.

The one file: ``--rules`` if given; else ``HEALTHCHECK_RULES``; else the nearest ``healthcheck.yaml``
from the working directory up to the repository root; else ``[tool.healthcheck]`` of the nearest
``pyproject.toml``; else the pack ``healthcheck:recommended``. Two files that were found are never
merged. A ``healthcheck.yaml`` that is somebody else's is named and skipped.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from healthcheck.core.errors import Problem, RuleFileError, UsageError
from healthcheck.core.setting import Setting, SettingError
from healthcheck.core.text import suggest
from healthcheck.rulelang.loader import load_file
from healthcheck.rulelang.rule import Origin
from healthcheck.rulelang.settings import PYPROJECT_ONLY, SETTINGS, parse_setting
from healthcheck.rulelang.sources import FILE_KEYS, is_pack_name

FILE_NAMES = ("healthcheck.yaml", "healthcheck.yml")
DEFAULT_PACK = "healthcheck:recommended"
VARIABLE = "HEALTHCHECK_RULES"


@dataclass(slots=True)
class Discovery:
    """What to load and what to say about it."""

    sources: list[Any]
    label: str
    """What the start line names."""
    notes: list[str] = field(default_factory=list)
    """Sentences worth saying once."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of ``[tool.healthcheck]``, as values in use; those of rule files come with the rules."""
    setting_origins: dict[str, Origin] = field(default_factory=dict)
    path: Path | None = None
    """The file that was found."""
    foreign: dict[str, Any] = field(default_factory=dict)
    """Settings of ``[tool.healthcheck]`` with a dot in their name, as written: plugins know what they take."""

    def plugin_settings(self, known: Mapping[str, Setting]) -> dict[str, Any]:
        """:attr:`foreign` as values in use. Raises ``RuleFileError`` for what no loaded plugin takes.

        :param known: settings of the loaded plugins.
        """
        values: dict[str, Any] = {}
        problems: list[Problem] = []
        for name, value in self.foreign.items():
            try:
                values[name] = parse_setting(name, value, known)
            except SettingError as error:
                head = name.partition(".")[0]
                hint = suggest(head, [*SETTINGS, *PYPROJECT_ONLY]) if name not in known else ""
                text = f'unknown key "{head}"' if hint else str(error)
                where = f"{self.setting_origins[name]}: tool.healthcheck.{head if hint else name}"
                problems.append(Problem(where, 0, 0, "bad-setting", text, suggestion=hint))
        if problems:
            raise RuleFileError(problems)
        return values


def discover(rules: Any = None, *, start: Path | None = None, environ: Mapping[str, str] | None = None) -> Discovery:
    """Decide on the rules.

    :param rules: what the caller gave: None, one source or a list of sources (path, pack name,
        YAML text, dict). Given rules replace everything that could be found.
    :param start: folder to start from; default the working directory.

    Raises ``UsageError`` for a broken ``[tool.healthcheck]``, ``RuleFileError`` for an unreadable
    ``healthcheck.yaml``.
    """
    if rules is not None:
        sources = list(rules) if isinstance(rules, Sequence) and not isinstance(rules, str) else [rules]
        return Discovery([_in_folder(s) for s in sources], _label(sources))
    environ = os.environ if environ is None else environ
    named = environ.get(VARIABLE, "")
    if named:
        sources = [part for part in (named.split(",") if "," in named else named.split(os.pathsep)) if part]
        if is_pack_name(named):
            sources = [named]
        return Discovery([_in_folder(s) for s in sources], f"{_label(sources)} (from {VARIABLE})")
    notes: list[str] = []
    folders = list(_upwards(start or Path.cwd()))
    for folder in folders:
        for name in FILE_NAMES:
            path = folder / name
            if path.is_file() and _is_ours(path, notes):
                return Discovery([str(path)], _relative(path), notes, path=path)
    for folder in folders:
        path = folder / "pyproject.toml"
        if path.is_file():
            found = _from_pyproject(path, notes)
            if found is not None:
                return found
            break
    return Discovery([DEFAULT_PACK], f"{DEFAULT_PACK} (no config found)", notes)


def configured_plugins(start: Path | None = None) -> list[str]:
    """Local plugins that ``[tool.healthcheck]`` of the nearest ``pyproject.toml`` names.

    They count beside a ``healthcheck.yaml`` too: a rule file cannot name plugins, since it must
    not be able to make code run. Files are relative to ``pyproject.toml``. A table that cannot be
    read names none here; it is reported where its settings are used. Only what runs code of the
    folder anyway loads them (:func:`healthcheck.assembly.running_host`).
    """
    for folder in _upwards(start or Path.cwd()):
        path = folder / "pyproject.toml"
        if path.is_file():
            try:
                table = _tool_table(path, []) or {}
            except UsageError:
                return []
            return _plugins(path, table.get("plugins"))
    return []


def _plugins(path: Path, written: Any) -> list[str]:
    names = written if isinstance(written, list) else []
    return [str(path.parent / n) if n.endswith(".py") else n for n in names if isinstance(n, str)]


def _upwards(start: Path) -> Iterator[Path]:
    """The folder and its parents up to the root of the repository; outside of one, only the folder."""
    start = start.resolve()
    chain = [start, *start.parents]
    root = next((i for i, folder in enumerate(chain) if (folder / ".git").exists()), 0)
    yield from chain[: root + 1]


def _in_folder(source: Any) -> Any:
    """A folder stands for the ``healthcheck.yaml`` in it."""
    if isinstance(source, (str, Path)) and "\n" not in str(source):
        for name in FILE_NAMES:
            try:
                if (Path(source) / name).is_file():
                    return str(Path(source) / name)
            except OSError:
                break
    return source


def _label(sources: Sequence[Any]) -> str:
    words = []
    for source in sources:
        if isinstance(source, Mapping):
            words.append("rules from code")
        elif isinstance(source, str) and "\n" in source:
            words.append("rules from text")
        else:
            words.append(str(source))
    return ", ".join(dict.fromkeys(words)) or "no rules"


def _is_ours(path: Path, notes: list[str]) -> bool:
    """Whether a ``healthcheck.yaml`` that lies around is a rule file; a foreign one is noted."""
    document = load_file(path, shown=_relative(path))
    data = document.data
    if data is None and any(p.slug in ("unreadable",) for p in document.problems):
        raise RuleFileError(document.problems)
    if isinstance(data, Mapping):
        ours = isinstance(data.get("version"), int) or (
            "version" in data and bool((FILE_KEYS - {"version"}) & set(data))
        )
    else:
        # Broken YAML: the text says whose it is, so that our own file is used and its mistakes are shown.
        ours = any(re.match(r"version\s*:\s*\d+\s*(#.*)?$", line) for line in document.lines)
    if not ours:
        reason = (
            "is empty"
            if any(p.slug == "empty" for p in document.problems)
            else "has no `version:`, so it is not a healthcheck file"
        )
        notes.append(f"{_relative(path)} {reason}; skipped")
    return ours


def _from_pyproject(path: Path, notes: list[str]) -> Discovery | None:
    table = _tool_table(path, notes)
    if table is None:
        return None
    shown = _relative(path)
    found = Discovery([], f"{shown} [tool.healthcheck]", notes, path=path)
    problems: list[Problem] = []
    for key, value in table.items():
        if key in PYPROJECT_ONLY:
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                problems.append(
                    Problem(
                        f"{shown}: tool.healthcheck.{key}",
                        0,
                        0,
                        "bad-setting",
                        'expected a list of names, such as ["rules.yaml"]',
                    )
                )
            elif key == "rules":
                found.sources = [v if is_pack_name(v) else str(path.parent / v) for v in value]
            continue
        foreign = _dotted(key, value)
        if key not in SETTINGS and foreign:
            found.foreign.update(foreign)
            found.setting_origins.update(dict.fromkeys(foreign, Origin(shown)))
            continue
        try:
            found.settings[key] = parse_setting(key, value)
            found.setting_origins[key] = Origin(shown)
        except SettingError as error:
            hint = suggest(key, [*SETTINGS, *PYPROJECT_ONLY]) if key not in SETTINGS else ""
            problems.append(
                Problem(
                    f"{shown}: tool.healthcheck.{key}",
                    0,
                    0,
                    "bad-setting",
                    str(error) if not hint else f'unknown key "{key}"',
                    suggestion=hint,
                )
            )
    if problems:
        raise RuleFileError(problems)
    if not found.sources:
        found.sources = [DEFAULT_PACK]
        found.label = f"{DEFAULT_PACK} (settings from {shown})"
    return found


def _dotted(key: str, value: Any) -> dict[str, Any]:
    """``acme.room``, however TOML writes it: as a quoted key, a dotted key or a table of its own. Empty: it has no dot."""
    if "." in key:
        return {key: value}
    return {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, Mapping) else {}


def _tool_table(path: Path, notes: list[str]) -> Mapping[str, Any] | None:
    """``[tool.healthcheck]``, or None if the file has none. Raises ``UsageError`` if it is not TOML."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        notes.append(f"{_relative(path)} cannot be read ({error}); skipped")
        return None
    if "tool.healthcheck" not in text and '"healthcheck"' not in text:
        return None  # most projects: their file is not even parsed
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        tool = tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{_relative(path)} is not valid TOML: {error}") from None
    table = tool.get("healthcheck") if isinstance(tool, dict) else None
    return table if isinstance(table, dict) else None


def _relative(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except (OSError, ValueError):
        return str(path)
