"""Any value as strict JSON: no NaN literals, no objects that JSON lacks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from healthcheck.core.samples import encode_number


def strict(value: Any) -> Any:
    """The same value in plain JSON types; what is unknown becomes its text.

    A plugin may add a NaN or a tensor to the report; that must not cost the user the report.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return encode_number(value)
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [strict(item) for item in value]
    return str(value)


def dump_line(value: Any) -> bytes:
    """One line of a JSON-lines file."""
    return json.dumps(strict(value), separators=(",", ":"), allow_nan=False).encode() + b"\n"
