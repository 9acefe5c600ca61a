"""SHA-256, imported when it is first needed: ``hashlib`` brings OpenSSL, 3.6 MB that most runs and replays do without."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash


def sha256(*parts: bytes) -> _Hash:
    """The hash object of these bytes, one after the other; has ``digest()`` and ``hexdigest()``."""
    import hashlib

    made = hashlib.sha256()
    for part in parts:
        made.update(part)
    return made
