"""Helpers for authors of rules and plugins. Public: names here change only with a deprecation.

- :func:`play`: numbers through rules, or through a session; :class:`Played` is what came of it.
- :class:`FakeTrainer`: a trainer without torch that emits every event of a real run.
- :func:`check_plugin`: does a plugin fit the hook specification? Returns every mistake.
- the pytest fixture ``inject``: break a real training on purpose (``inject("nan-grad@3")``).
- :class:`HealthCheckFailed`: what a watched test fails with.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from healthcheck.core.errors import HealthCheckFailed
    from healthcheck.testing.fake import FakeControls, FakeModel, FakeTrainer
    from healthcheck.testing.playing import Played, open_test_session, play
    from healthcheck.testing.plugincheck import check_plugin

_HOME = {
    "FakeControls": "testing.fake",
    "FakeModel": "testing.fake",
    "FakeTrainer": "testing.fake",
    "HealthCheckFailed": "core.errors",
    "Played": "testing.playing",
    "check_plugin": "testing.plugincheck",
    "open_test_session": "testing.playing",
    "play": "testing.playing",
}

__all__ = [
    "FakeControls",
    "FakeModel",
    "FakeTrainer",
    "HealthCheckFailed",
    "Played",
    "check_plugin",
    "open_test_session",
    "play",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'healthcheck.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"healthcheck.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
