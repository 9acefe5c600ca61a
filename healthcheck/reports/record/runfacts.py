"""What ``run.json`` says of a run: enough to find and compare it, nothing secret."""

from __future__ import annotations

import os
import platform
import socket
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from healthcheck import __version__
from healthcheck.redact import redact_argv, redact_text

if TYPE_CHECKING:
    from healthcheck.session import Session

RUN_FORMAT = "healthcheck-run"
RUN_VERSION = 1

_JOB = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_NODEID",
    "SLURM_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "LOCAL_RANK",
)
"""Variables of launchers that are recorded; the environment as a whole never is."""


def run_facts(session: Session, wall: float) -> dict[str, Any]:
    """The content of ``run.json``. ``wall`` is the time of the start in seconds since 1970."""
    info = session.info
    facts: dict[str, Any] = {
        "format": RUN_FORMAT,
        "version": RUN_VERSION,
        "name": info.name or (info.run_dir.name if info.run_dir is not None else ""),
        "target": redact_text(info.target),
        "argv": redact_argv(info.argv),
        "started": datetime.fromtimestamp(wall, timezone.utc).isoformat(timespec="seconds"),
        "folder": os.getcwd(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": info.rank,
        "world_size": info.world_size,
        "resumed_from": info.resumed_from,
        "mode": "observe" if session.observing else "act",
        "rules_source": session.rules.source,
        "profile": session.rules.profile or None,
        "versions": {
            "healthcheck": __version__,
            "python": platform.python_version(),
            "torch": _torch_version(),
            "platform": platform.platform(),
        },
        "job": {name: os.environ[name] for name in _JOB if os.environ.get(name)},
    }
    return {key: value for key, value in facts.items() if value is not None}


def _torch_version() -> str | None:
    """Without importing torch: the script may not have done so yet."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return str(getattr(torch, "__version__", ""))
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None
