"""Finding what ``extends`` names: shipped packs, plugin packs, relative files.

``healthcheck:recommended`` is the newest form of the pack; ``healthcheck:recommended@1`` the form
of version 1, rules and thresholds frozen. The newest lies in ``recommended.yaml`` and says its
version in ``pack: {version: n}``; older ones lie beside it as ``recommended@1.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from healthcheck.dispatch import suggest
from healthcheck.registry import BUILTIN, Registry
from healthcheck.rulelang.document import Document
from healthcheck.rulelang.loader import load_file

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
    path = frozen if frozen is not None and frozen.is_file() else newest
    document = load_file(path, shown=name)
    document.own = False
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
        if path.is_file():
            return path
    known = pack_names(registry)
    hint = suggest(f"{owner}:{short}", known) or (f"there are {', '.join(known)}" if known else "")
    if owner != BUILTIN and not any(name.startswith(f"{owner}:") for name in known):
        raise PackError(f'no plugin "{owner}" with rule packs is installed', hint)
    raise PackError(f'there is no pack "{owner}:{short}"', hint)
