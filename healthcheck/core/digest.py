"""SHA-256 without ``hashlib``, where that has not been imported yet: it brings OpenSSL, 3.6 MiB that a replay does without."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash

_OWN = ("_sha2", "_sha256")
"""Where Python's own code is, which ``hashlib`` falls back to: from 3.12 on, and before. A build may leave it out."""


def sha256(*parts: bytes) -> _Hash:
    """The hash object of these bytes, one after the other; has ``digest()`` and ``hexdigest()``."""
    made: _Hash = _module().sha256()
    for part in parts:
        made.update(part)
    return made


def _module() -> ModuleType:
    # Beside torch it is there anyhow, and OpenSSL's code is the faster one.
    if "hashlib" not in sys.modules:
        for name in _OWN:
            try:
                return importlib.import_module(name)
            except ImportError:
                continue
    return importlib.import_module("hashlib")
