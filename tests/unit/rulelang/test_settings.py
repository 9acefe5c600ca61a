"""Settings: one table, one precedence, and the origin of each value."""

from __future__ import annotations

import pytest

from healthcheck.core.errors import UsageError
from healthcheck.rulelang.rule import Origin
from healthcheck.rulelang.settings import SETTINGS, SettingError, parse_setting, resolve


def test_flags_beat_environment_beats_file_beats_default() -> None:
    written, origins = {"mode": "observe", "fail_on": "info", "keep": 5}, {"mode": Origin("team.yaml", 3)}
    environ = {"HEALTHCHECK_FAIL_ON": "warning", "HEALTHCHECK_KEEP": "7"}
    resolved = resolve(written, origins, environ, {"keep": 9, "profile": None})
    assert resolved["mode"] == "observe"
    assert resolved["fail_on"] == "warning"
    assert resolved["keep"] == 9
    assert resolved["gate"] == "auto"
    came = resolved.origins
    assert (came["mode"], came["fail_on"], came["keep"], came["gate"]) == (
        "team.yaml:3",
        "HEALTHCHECK_FAIL_ON",
        "--keep",
        "default",
    )


@pytest.mark.parametrize(
    ("name", "written", "used"),
    [
        ("overhead_budget", "1%", 0.01),
        ("overhead_budget", "off", None),
        ("sync_every", "auto", None),
        ("sync_every", 10, 10),
        ("report", "json=a.json, junit=b.xml", ["json=a.json", "junit=b.xml"]),
        ("report", {"json": "a.json"}, ["json=a.json"]),
        ("capture", False, False),
        ("capture", "off", False),
        ("capture", ["loss"], ["loss"]),
        ("evidence", "full", {"batch": "full"}),
        ("evidence", {"max": 3, "size": "1MiB"}, {"max": 3, "size": 2**20}),
        ("gate", False, "off"),
    ],
)
def test_written_values_become_values_in_use(name, written, used) -> None:
    assert parse_setting(name, written) == used


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("mode", "watch"),
        ("mod", "act"),
        ("keep", 0),
        ("keep", "many"),
        ("overhead_budget", "200%"),
        ("evidence", {"bach": "full"}),
        ("evidence", 5),
        ("report", 5),
        ("log_prefix", 5),
    ],
)
def test_other_values_are_refused(name, written) -> None:
    with pytest.raises(SettingError):
        parse_setting(name, written)


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(UsageError, match=r"HEALTHCHECK_MODE.*obsrve"):
        resolve({}, {}, {"HEALTHCHECK_MODE": "obsrve"})


def test_every_default_is_a_value_that_the_setting_could_take() -> None:
    for setting in SETTINGS.values():
        if setting.default is not None and setting.default != ():
            parse_setting(setting.name, setting.default)
        assert setting.help.endswith(".")
        assert setting.env.startswith("HEALTHCHECK_")
