"""``--report json=PATH``: a copy of the report where CI wants it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.reports.rundir import write_atomically

if TYPE_CHECKING:
    from healthcheck.session import Session


class JsonReport:
    """Writes the content of ``report.json`` to the path of the setting ``report: {json: PATH}``."""

    name = "json"

    def __init__(self) -> None:
        self._session: Session | None = None
        self._path: Path | None = None

    def start(self, session: Session) -> None:
        self._session = session
        wanted = session.settings.get("report")
        named = wanted.get("json") if isinstance(wanted, Mapping) else None
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
