"""From what the caller names to documents in order: packs found, every ``extends`` followed, each file once.

``healthcheck:recommended`` is the newest form of the pack; ``healthcheck:recommended@1`` the form
of version 1, rules and thresholds frozen. The newest lies in ``recommended.yaml`` and says its
version in ``pack: {version: n}``; older ones lie beside it as ``recommended@1.yaml``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from healthcheck.core.errors import Problem
from healthcheck.core.text import suggest
from healthcheck.extend.registry import BUILTIN, Registry
from healthcheck.rulelang.document import Document
from healthcheck.rulelang.loader import load_file, load_mapping, load_text
from healthcheck.rulelang.rule import RuleSet

Source = "str | Path | Mapping[str, Any]"
FILE_KEYS = frozenset(
    ("version", "extends", "defaults", "metrics", "external", "rules", "profiles", "settings", "renamed", "pack")
)
MAX_FILES = 200


class Collector:
    """Reads sources and what they extend, inherited documents first."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.documents: list[Document] = []
        self.problems: list[Problem] = []
        self.incomplete = False
        """Something extended is not there, or cannot be read: which rules exist is not known."""
        self.layer = 0
        """Of what is added now; see :class:`Joining`."""
        self._seen: set[str] = set()
        self._open: list[str] = []

    def add(self, source: Any, index: int = 0, shown: str = "") -> None:
        """A path, a pack name, YAML text, a whole file as dict, or only its rules as dict."""
        if isinstance(source, Mapping):
            shown = shown or ("rules" if not index else f"rules[{index}]")
            self._take(load_mapping(_whole_file(source), shown=shown), key=f"<dict {index}>")
        elif isinstance(source, Document):
            self._take(source, key=source.path)
        elif isinstance(source, str) and ("\n" in source or source.lstrip().startswith(("version:", "{"))):
            self._take(load_text(source, shown="<rules>" if not index else f"<rules {index}>"), key=f"<text {index}>")
        elif isinstance(source, str) and is_pack_name(source) and not os.path.isfile(source):
            self._pack(source, None, ())
        elif isinstance(source, (str, Path)):
            self._file(Path(source))
        else:
            self.problems.append(
                Problem(
                    "rules",
                    0,
                    0,
                    "bad-source",
                    f"rules cannot come from a {type(source).__name__}; give a path, a dict or text",
                )
            )

    def _file(self, path: Path) -> None:
        key = _identity(path)
        if key not in self._seen:
            self._take(load_file(path, shown=_shown(path)), key=key)

    def _pack(self, name: str, extending: Document | None, where: tuple[str | int, ...]) -> None:
        by_name = extending is None or extending.own
        if self._is_open(name, name, extending, where):
            return
        if name in self._seen:
            for known in self.documents if by_name else ():
                known.named |= known.path == name
            return
        try:
            document = load_pack(name, self.registry)
        except PackError as error:
            self.incomplete = True
            if extending is None:
                self.problems.append(Problem(name, 0, 0, "no-such-pack", str(error), suggestion=error.suggestion))
            else:
                self.problems.append(extending.problem(where, "no-such-pack", str(error), suggestion=error.suggestion))
            return
        document.named = by_name
        self._take(document, key=name)

    def _take(self, document: Document, *, key: str) -> None:
        self._seen.add(key)
        self._open.append(key)
        document.layer = self.layer
        if len(self._seen) > MAX_FILES:
            self.problems.append(document.problem((), "too-many-files", f"more than {MAX_FILES} rule files"))
            return
        names = document.data.get("extends") if isinstance(document.data, dict) else None
        if isinstance(names, str) and names.strip():  # refused by the schema; followed, so that its name is checked too
            self._extend(document, names.strip(), ("extends",))
        elif isinstance(names, list):
            for i, name in enumerate(names):
                if isinstance(name, str) and name.strip():
                    self._extend(document, name.strip(), ("extends", i))
        self.incomplete |= document.data is None
        self._open.pop()
        self.documents.append(document)
        self.problems.extend(document.problems)

    def _extend(self, document: Document, name: str, where: tuple[str | int, ...]) -> None:
        if "://" in name:
            self.incomplete = True
            self.problems.append(
                document.problem(
                    where, "no-network", "rules are never fetched from the network", suggestion="name a file or a pack"
                )
            )
        elif is_pack_name(name):
            self._pack(name, document, where)
        else:
            path = (document.folder or Path()) / name
            key = _identity(path)
            if self._is_open(key, name, document, where) or key in self._seen:
                return
            if not os.path.isfile(path):
                self.incomplete = True
                hint = (
                    f'a pack is written with its plugin, such as "healthcheck:{name}"'
                    if "." not in name and "/" not in name
                    else ""
                )
                self.problems.append(
                    document.problem(
                        where, "no-such-file", f'there is no file "{name}" beside this one', suggestion=hint
                    )
                )
                return
            inherited = load_file(path, shown=_shown(path))
            inherited.own = document.own
            self._take(inherited, key=key)

    def _is_open(self, key: str, name: str, document: Document | None, where: tuple[str | int, ...]) -> bool:
        if key not in self._open:
            return False
        if document is not None:
            ring = " -> ".join(Path(k).name for k in [*self._open[self._open.index(key) :], key])
            self.problems.append(document.problem(where, "extends-cycle", f"`extends` goes in a circle: {ring}"))
        return True


class Joining(NamedTuple):
    """Rules that join others in a run that is open: one layer more."""

    name: str
    """Who brings them, as people call it: ``LossMonitorCallback``."""
    sources: Sequence[Any]


@dataclass(slots=True)
class RuleLayers:
    """Where the rules of one run come from, and how to have them with more."""

    load: Callable[[Any, Sequence[Joining]], RuleSet] | None = None
    """Rules as the options of a session say, with layers over them; None for rules that were made by hand."""
    opened_with: Any = None
    """The :class:`~healthcheck.run.opening.SessionOptions` of the run."""
    joined: list[Joining] = field(default_factory=list)
    known: list[Any] = field(default_factory=list)
    """Options that have joined already: some callbacks begin several times."""
    of_callbacks: bool = False
    """Whether nothing but callbacks with rules of their own opened the run: nobody has asked for rules that are found."""


def collect(sources: Iterable[Any], registry: Registry, joining: Iterable[Joining] = ()) -> Collector:
    """All documents, the ones extended before those that extend them; and what went wrong.

    With others that join, packs go before all that people wrote, whoever names them.
    """
    collector = Collector(registry)
    index = -1
    for index, source in enumerate(sources):
        collector.add(source, index)
    for layer in joining:
        collector.layer += 1
        for source in layer.sources:
            index += 1
            collector.add(source, index, f"rules of {layer.name}")
    if collector.layer:
        collector.documents.sort(key=lambda document: document.own)
    return collector


def _whole_file(source: Mapping[str, Any]) -> Mapping[str, Any]:
    """A dict may be a whole file or only its rules; ``version`` may be left out in code."""
    if FILE_KEYS & {str(key) for key in source}:
        return source if "version" in source else {"version": 1, **source}
    return {"version": 1, "rules": source}


def _identity(path: Path) -> str:
    try:
        return str(path.resolve())
    except (OSError, RuntimeError, ValueError):
        return str(path)


def _shown(path: Path) -> str:
    """Relative to the working directory where that is shorter."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except (OSError, ValueError, RuntimeError):
        return str(path)


# --------------------------------------------------------------------------- packs


_PACK = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*):([A-Za-z0-9][A-Za-z0-9_.-]*)(?:@(\d+))?")


class PackError(ValueError):
    """A pack or file cannot be found; the message names what exists."""

    def __init__(self, message: str, suggestion: str = "") -> None:
        super().__init__(message)
        self.suggestion = suggestion


def is_pack_name(text: str) -> bool:
    """``healthcheck:recommended@1`` is; ``rules/team.yaml`` and ``C:\\rules.yaml`` are not."""
    return _PACK.fullmatch(text) is not None and not text.endswith((".yaml", ".yml"))


def load_pack(name: str, registry: Registry) -> Document:
    """Read a pack. Raises ``PackError`` if there is none of that name or version."""
    found = _PACK.fullmatch(name)
    if found is None:
        raise PackError(f'"{name}" is not the name of a pack', "write for instance healthcheck:recommended")
    owner, short, version = found[1], found[2], found[3]
    newest = _locate(owner, short, registry)
    frozen = newest.with_name(f"{newest.stem}@{version}{newest.suffix}") if version else None
    path = frozen if frozen is not None and os.path.isfile(frozen) else newest
    document = load_file(path, shown=name)
    document.own, document.shipped = False, owner == BUILTIN
    if version and path is newest and pack_version(document) != int(version):
        raise PackError(f'"{owner}:{short}" has no version {version}; the newest is {pack_version(document)}')
    return document


def pack_version(document: Document) -> int:
    """The version that a pack says it has; 1 unless it says so."""
    header = document.data.get("pack") if isinstance(document.data, dict) else None
    version = header.get("version") if isinstance(header, dict) else None
    return version if isinstance(version, int) else 1


def pack_names(registry: Registry) -> list[str]:
    """All packs that can be extended."""
    shipped = [f"{BUILTIN}:{path.stem}" for path in shipped_packs() if "@" not in path.stem]
    return sorted({*shipped, *registry.packs})


def shipped_packs() -> Iterator[Path]:
    """Pack files of this distribution, tests of rules excluded."""
    for path in sorted(pack_folder().glob("*.yaml")):
        if not path.name.endswith(".hctest.yaml"):
            yield path


def is_shipped(source: str) -> bool:
    """Whether this is a pack of this distribution, by its name or as a file."""
    if is_pack_name(source):
        return source.startswith(f"{BUILTIN}:")
    return Path(source).resolve().parent == pack_folder().resolve()


def pack_folder() -> Path:
    """``healthcheck.rulepacks`` where installed, else ``rules/`` beside the package (a checkout)."""
    try:
        folder = Path(str(resources.files("healthcheck.rulepacks")))
        if folder.is_dir():
            return folder
    except ModuleNotFoundError:
        pass
    return Path(__file__).resolve().parents[2] / "rules"


def _locate(owner: str, short: str, registry: Registry) -> Path:
    registered = registry.packs.get(f"{owner}:{short}")
    if registered is not None:
        return Path(registered)
    if owner == BUILTIN:
        path = pack_folder() / f"{short}.yaml"
        if os.path.isfile(path):
            return path
    known = pack_names(registry)
    hint = suggest(f"{owner}:{short}", known) or (f"there are {', '.join(known)}" if known else "")
    if owner != BUILTIN and not any(name.startswith(f"{owner}:") for name in known):
        raise PackError(f'no plugin "{owner}" with rule packs is installed', hint)
    raise PackError(f'there is no pack "{owner}:{short}"', hint)
