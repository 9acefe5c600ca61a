"""Settings that plugins add: in rule files, the environment and code, with mistakes reported like our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from healthcheck import RuleFileError, Setting, UsageError, hookimpl
from healthcheck.assembly import load_rules_for, plugin_host
from healthcheck.extend.host import PluginHost
from healthcheck.testing import check_plugin

SCHEMA = {
    "type": "object",
    "properties": {"to": {"type": "string"}, "every": {"type": "integer", "minimum": 1}},
    "additionalProperties": False,
}


class Upload:
    @hookimpl
    def healthcheck_register_settings(self, register: Callable[[Setting], None]) -> None:
        register(Setting("acme.upload", None, "Where the results of a run go.", SCHEMA))


@pytest.fixture
def host() -> PluginHost:
    host = plugin_host()
    host.register(Upload(), "acme")
    return host


def settings_of(host: PluginHost, text: str, **choice: Any) -> Any:
    rules = load_rules_for(host=host, rules=f"version: 1\nrules: {{}}\n{text}", **choice)
    return rules.settings.get("acme.upload")


def test_a_value_of_a_rule_file_is_in_the_settings_of_the_run(host: PluginHost) -> None:
    assert settings_of(host, "settings: {acme.upload: {to: there, every: 5}}") == {"to": "there", "every": 5}
    assert settings_of(host, "") is None


def test_the_environment_beats_the_file_and_code_beats_both(host: PluginHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEALTHCHECK_ACME_UPLOAD", "{to: env, every: 7}")
    file = "settings: {acme.upload: {to: file}}"
    assert settings_of(host, file) == {"to": "env", "every": 7}
    assert settings_of(host, file, settings={"acme.upload": {"to": "code"}}) == {"to": "code"}


def test_a_mistake_in_it_has_its_line_and_column(host: PluginHost) -> None:
    with pytest.raises(RuleFileError) as caught:
        settings_of(host, "settings:\n  acme.upload: {too: there}")
    [problem] = caught.value.problems
    assert (problem.line, problem.column) == (4, 17)
    assert '"to"' in f"{problem}{problem.suggestion}"


def test_a_mistake_in_the_environment_names_the_variable(host: PluginHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEALTHCHECK_ACME_UPLOAD", "{every: 0}")
    with pytest.raises(UsageError, match=r"HEALTHCHECK_ACME_UPLOAD: every: 0 is less than the minimum of 1"):
        settings_of(host, "")


def test_without_its_plugin_the_key_is_unknown() -> None:
    with pytest.raises(RuleFileError, match=r"acme\.upload"):
        settings_of(plugin_host(), "settings: {acme.upload: {to: there}}")


def test_a_name_without_a_dot_is_refused_and_a_bad_schema_found() -> None:
    class Bare:
        @hookimpl
        def healthcheck_register_settings(self, register: Callable[[Setting], None]) -> None:
            register(Setting("mode", None, "mine", {}))

    class Bad:
        @hookimpl
        def healthcheck_register_settings(self, register: Callable[[Setting], None]) -> None:
            register(Setting("acme.x", None, "", {"type": "objekt"}))

    assert "needs a name of its own with a dot" in check_plugin(Bare(), "acme")[0]
    assert len(check_plugin(Bad(), "acme")) == 2
    assert check_plugin(Upload(), "acme") == []
