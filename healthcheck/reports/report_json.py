"""``--report json=PATH``: a copy of the report where CI wants it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.reports.rundir import write_atomically

if TYPE_CHECKING:
    from healthcheck.session import Session


class JsonReport:
    """Writes the content of ``report.json`` to the path of the setting ``report: [json=PATH]``."""

    name = "json"

    def __init__(self) -> None:
        self._session: Session | None = None
        self._path: Path | None = None

    def start(self, session: Session) -> None:
        self._session = session
        named = wanted_path(session.settings.get("report"), "json")
        if named and session.info.rank == 0:
            self._path = Path(str(named)).expanduser().absolute()  # the script may change directory

    def finish(self, report: dict[str, Any]) -> None:
        if self._path is None or self._session is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, report)
        except OSError as error:
            self._session.note(f"--report json={self._path} could not be written: {error.strerror}")


def wanted_path(setting: Any, kind: str) -> str:
    """The path of one kind of report in the setting ``report``: ``[json=hc.json, ...]`` or a mapping."""
    if isinstance(setting, Mapping):
        return str(setting.get(kind) or "")
    for entry in (setting,) if isinstance(setting, str) else setting or ():
        name, _, path = str(entry).partition("=")
        if name.strip() == kind:
            return path.strip()
    return ""
