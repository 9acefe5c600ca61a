"""Settings that plugins add: written in rule files, the environment and pyproject.toml, checked by their schema."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healthcheck import RuleFileError, Setting, UsageError, open_session
from healthcheck.testing import check_plugin, open_test_session, play

PLUGIN = '''
from healthcheck import Metric, EventKind, Sample, Setting, hookimpl

SEEN = []


class Probe:
    """Needs a device that is not here."""

    name = "acme-device"
    listens_to = (EventKind.STEP_END,)
    provides = (Metric("acme.heat", help="heat of the device"),)

    def sample(self, event, demand):
        return ()

    def reason_without(self, key):
        return "the driver of acme was not found"


@hookimpl
def healthcheck_register_settings(register):
    register(Setting("acme.room", "", "Which room hears of it.", {"type": "string", "pattern": "^[a-z]*$"}))
    register(Setting("acme.most", 3, "Most messages.", {"type": "integer", "minimum": 1}))


@hookimpl
def healthcheck_register_probes(register):
    register(Probe())


@hookimpl
def healthcheck_register_rulepacks(register):
    from pathlib import Path

    register("heat", str(Path(__file__).parent / "heat.yaml"))
'''
RULES: dict[str, Any] = {"version": 1, "rules": {"high": {"metric": "loss", "when": {"above": 5}}}}


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "heat.yaml").write_text(
        "version: 1\nrules: {hot: {metric: acme.heat, when: {above: 90}, kind: measure}}\n"
    )
    (tmp_path / "acme.py").write_text(PLUGIN)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "acme.py")


def settings(plugin: str, **written: Any) -> dict[str, Any]:
    session = open_test_session({**RULES, "settings": written}, plugins=[plugin])
    return {name: session.settings[name] for name in ("acme.room", "acme.most")}


def test_a_rule_file_sets_it_and_what_is_not_written_has_its_default(plugin: str) -> None:
    assert settings(plugin, **{"acme.room": "ops"}) == {"acme.room": "ops", "acme.most": 3}


def test_the_environment_beats_the_file_and_its_text_is_read_by_the_schema(
    plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEALTHCHECK_ACME_MOST", "12")
    assert settings(plugin, **{"acme.most": 4})["acme.most"] == 12
    monkeypatch.setenv("HEALTHCHECK_ACME_MOST", "many")
    with pytest.raises(UsageError, match=r"HEALTHCHECK_ACME_MOST: 'many' is not of type 'integer'"):
        settings(plugin)


def test_a_mistake_in_a_rule_file_has_line_and_column(plugin: str, tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text(
        "version: 1\nsettings:\n  acme.rom: ops\n  acme.most: 0\nrules:\n  high: {metric: loss, when: {above: 5}}\n"
    )
    with pytest.raises(RuleFileError) as raised:
        open_test_session(str(tmp_path / "rules.yaml"), plugins=[plugin])
    places = {(problem.line, problem.suggestion) for problem in raised.value.problems}
    assert (3, 'did you mean "acme.room"?') in places
    assert 4 in {line for line, _ in places}


@pytest.mark.parametrize("table", ['"acme.room" = "ops"', 'acme.room = "ops"', '[tool.healthcheck.acme]\nroom = "ops"'])
def test_pyproject_may_write_the_dot_in_every_way_of_toml(plugin: str, tmp_path: Path, table: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.healthcheck]\n{table}\n")
    session = open_session(target="t", plugins=[plugin], record=False, console=False)
    assert session.settings["acme.room"] == "ops"


def test_a_key_of_pyproject_that_no_plugin_takes_is_an_error_that_names_it(plugin: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.healthcheck]\nacme.rom = "ops"\n')
    with pytest.raises(RuleFileError, match=r"acme\.rom"):
        open_session(target="t", plugins=[plugin], record=False, console=False)


def test_commands_show_it(plugin: str, tmp_path: Path, healthcheck_command: Callable[..., Any]) -> None:
    assert "settings" in healthcheck_command("plugins", "-p", plugin).stdout
    (tmp_path / "rules.yaml").write_text(
        "version: 1\nsettings: {acme.room: ops}\nrules: {high: {metric: loss, when: {above: 5}}}\n"
    )
    shown = healthcheck_command("check", "rules.yaml", "-p", plugin, "--print-config", cwd=tmp_path).stdout
    assert "acme.room: ops" in shown


def test_a_setting_without_a_dot_or_of_another_kind_is_refused() -> None:
    def plugin(setting: Any) -> Any:
        from healthcheck import hookimpl

        class Plugin:
            @hookimpl
            def healthcheck_register_settings(self, register: Callable[[Setting], None]) -> None:
                register(setting)

        return Plugin

    assert "needs a name of its own with a dot" in check_plugin(plugin(Setting("room", "", "h", {})), "acme")[0]
    assert "a setting needs" in check_plugin(plugin("acme.room"), "acme")[0]
    wrong = check_plugin(plugin(Setting("acme.room", "", "", {"type": "words"})), "acme")
    assert any("no help" in text for text in wrong)
    assert any("not a draft-07 schema" in text for text in wrong)


def test_a_rule_of_a_pack_does_not_apply_where_the_probe_says_why(plugin: str) -> None:
    played = play("acme:heat", {"loss": "1 x5"}, plugins=[plugin])
    assert played.report["rules"]["hot"]["verdict"] == "does not apply"
    assert played.report["rules"]["hot"]["reason"] == "the driver of acme was not found"


def test_the_users_own_rule_on_it_is_not_judged_with_that_reason(plugin: str) -> None:
    rules = {"version": 1, "rules": {"hot": {"metric": "acme.heat", "when": {"above": 90}}}}
    played = play(rules, {"loss": "1 x5"}, plugins=[plugin])
    assert played.report["rules"]["hot"]["verdict"] == "not judged"
    assert played.report["rules"]["hot"]["reason"] == "the driver of acme was not found"


def test_a_second_plugin_of_the_same_name_takes_nothing_from_the_first(plugin: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "acme.py").write_text("import healthcheck\n")
    session = open_test_session(RULES, plugins=[plugin, str(tmp_path / "other" / "acme.py")])
    assert session.settings["acme.most"] == 3
    assert any("loaded already" in note for note in session.info.notes)
