"""A setting of a run: what a key of ``settings:`` takes, for the built-in ones and for those of plugins. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def as_written(value: Any) -> Any:
    """The value itself."""
    return value


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of ``settings:``. A plugin registers it in the hook ``healthcheck_register_settings`` and reads
    ``session.settings[name]``."""

    name: str
    """That of a plugin carries a dot: ``acme.room``. It is also read from ``HEALTHCHECK_ACME_ROOM`` and from
    ``[tool.healthcheck]``."""
    default: Any
    help: str
    schema: Mapping[str, Any]
    """draft-07 schema of the value as written in YAML."""
    parse: Callable[[Any], Any] = as_written
    """From the written value, or an environment variable's text, to the value in use. It raises :class:`SettingError`, or
    another ``ValueError``, for a value that it does not take. The text for a setting of a plugin is read as YAML first where
    its schema takes more than text."""
    variable: str = ""
    """Environment variable; ``HEALTHCHECK_<NAME>`` unless given."""

    @property
    def env(self) -> str:
        """Name of the environment variable."""
        return self.variable or f"HEALTHCHECK_{self.name.upper().replace('.', '_').replace('-', '_')}"


class SettingError(ValueError):
    """A value that a setting does not take; the message says what it takes."""
