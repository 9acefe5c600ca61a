"""A report or alert that may leave the house: without host, user and paths."""

from __future__ import annotations

import getpass
import itertools
import os
import re
import socket
from typing import Any

from healthcheck.core.redact import redact_text

_PATH = re.compile(r"(?<![\w:/.<])(?:~|[A-Za-z]:)?(?:[/\\][\w.@+\- ]*[\w.@+\-]){2,}[/\\]?")
"""Absolute paths of two levels or more."""
_DROPPED = {"host", "folder", "pid", "argv", "job"}


def shareable(value: Any, names: dict[str, str] | None = None) -> Any:
    """The same value with host and user names replaced and absolute paths cut to their last part."""
    names = names if names is not None else _own_names()
    if isinstance(value, dict):
        return {key: shareable(item, names) for key, item in value.items() if key not in _DROPPED}
    if isinstance(value, list):
        return [shareable(item, names) for item in value]
    if not isinstance(value, str):
        return value
    text = _PATH.sub(lambda match: "<path>/" + re.split(r"[/\\]", match[0].rstrip("/\\"))[-1], value)
    for name, instead in names.items():
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", instead, text)
    return redact_text(text)


def names_to_hide(facts: dict[str, Any]) -> dict[str, str]:
    """The names of this machine and user, and those that the record holds."""
    names = _own_names()
    host = str(facts.get("host") or "")
    if host:
        names[host] = "<host>"
    parts = re.split(r"[/\\]", str(facts.get("folder") or ""))
    for before, user in itertools.pairwise(parts):
        if before in ("home", "Users") and user:
            names[user] = "<user>"
    return names


def _own_names() -> dict[str, str]:
    names = {}
    host = socket.gethostname()
    if host:
        names[host] = "<host>"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = os.environ.get("USER", "")
    if user and user != "root":
        names[user] = "<user>"
    return names
