"""``healthcheck check``, ``schema`` and ``explain`` as commands."""

from __future__ import annotations

import argparse
import importlib
import json

import pytest

from healthcheck.core.errors import HealthCheckError, UsageError

GOOD = "version: 1\nrules:\n  loss-not-finite: {metric: loss, when: nonfinite}\n"
BAD = "version: 1\nrules:\n  a: {metric: loss, condition: {gt: 5}, severty: error}\n"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs one command in an empty folder; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HEALTHCHECK_RULES", raising=False)

    def run(name: str, *argv: str) -> tuple[int, str, str]:
        module = importlib.import_module(f"healthcheck.cli.{name}")
        parser = argparse.ArgumentParser(prog=name)
        module.configure(parser)
        code = module.main(parser.parse_args(list(argv)))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_good_file_is_ok_and_exits_0(command, tmp_path) -> None:
    (tmp_path / "healthcheck.yaml").write_text(GOOD)
    code, out, err = command("check")
    assert code == 0
    assert out.splitlines()[-1].startswith("ok: 1 rule")
    assert "healthcheck.yaml" in err, "it says which file it found"


def test_errors_exit_4_with_the_source_line_and_a_caret(command, tmp_path) -> None:
    (tmp_path / "healthcheck.yaml").write_text(BAD)
    code, out, _ = command("check", "healthcheck.yaml")
    assert code == 4
    assert "    3 |   a: {metric: loss, condition: {gt: 5}, severty: error}" in out
    assert "      |                     ^^^^^^^^^" in out
    assert out.splitlines()[-1] == "3 errors; nothing was run"


def test_quiet_is_one_line_each(command, tmp_path) -> None:
    (tmp_path / "healthcheck.yaml").write_text(BAD)
    _, out, _ = command("check", "-q", "healthcheck.yaml")
    lines = out.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("healthcheck.yaml:3:") for line in lines)


def test_json_and_github_carry_place_slug_and_suggestion(command, tmp_path) -> None:
    (tmp_path / "healthcheck.yaml").write_text(BAD)
    _, out, _ = command("check", "--format", "json", "healthcheck.yaml")
    shaped = json.loads(out)
    assert shaped["errors"] == 3
    assert shaped["problems"][0]["line"] == 3
    assert shaped["problems"][0]["fix"] == {"old": "condition", "new": "when"}
    _, out, _ = command("check", "--format", "github", "healthcheck.yaml")
    assert out.splitlines()[0].startswith("::error file=healthcheck.yaml,line=3,col=21,title=unknown-key::")


def test_fix_rewrites_what_is_sure_and_leaves_the_rest_as_it_was(command, tmp_path) -> None:
    path = tmp_path / "healthcheck.yaml"
    path.write_text(
        "version: 1\n# my rules\nrules:\n  a:   {metric: loss,  condition: {gt: 5}, severty: critical}  # keep\n"
    )
    code, out, _ = command("check", "--fix", "healthcheck.yaml")
    assert code == 0, out
    assert (
        path.read_text()
        == "version: 1\n# my rules\nrules:\n  a:   {metric: loss,  when: {above: 5}, severity: error}  # keep\n"
    )
    assert out.count("fixed healthcheck.yaml:4:") == 4


def test_a_limit_without_its_unit_is_said_and_fixed_where_it_can_only_be_a_percentage(command, tmp_path) -> None:
    rules = """\
version: 1
extends: [healthcheck:core]
rules:
  full: {metric: memory.fraction, when: {above: 92}}  # of the card
  often: {metric: memory.fraction, when: {mean: {above: 90, window: 10}}}
  large: {metric: memory.allocated, when: {above: 20}}
  fine: {metric: memory.fraction, when: {above: 0.97}}
"""
    (tmp_path / "healthcheck.yaml").write_text(rules)
    code, out, _ = command("check", "-q")
    assert code == 0
    assert "4:49: warning[missing-unit]" in out
    assert 'memory.fraction is a part of 1, and 92 means 9200% (did you mean "92%"?)' in out
    assert "memory.allocated counts bytes, and this is 20 of them (did you mean 20GiB or 20MiB?)" in out
    assert "fine" not in out
    command("check", "--fix")
    mended = (tmp_path / "healthcheck.yaml").read_text()
    assert mended == rules.replace("above: 92", "above: 92%").replace("above: 90", "above: 90%")


def test_fix_never_touches_what_has_no_sure_answer(command, tmp_path) -> None:
    path = tmp_path / "healthcheck.yaml"
    text = "version: 1\nrules:\n  a: {metric: qqqqqq, when: {above: 5}}\n"
    path.write_text(text)
    code, _, _ = command("check", "--fix", "healthcheck.yaml")
    assert code == 4
    assert path.read_text() == text


def test_a_mistake_in_a_profile_is_found_without_naming_the_profile(command, tmp_path) -> None:
    (tmp_path / "healthcheck.yaml").write_text(GOOD + "profiles: {ci: {rules: {loss-not-finite: {for: 9 of 3}}}}\n")
    code, out, _ = command("check", "healthcheck.yaml")
    assert code == 4
    assert "can never happen" in out


def test_print_config_names_the_origin_of_each_key(command, tmp_path) -> None:
    (tmp_path / "base.yaml").write_text(GOOD)
    (tmp_path / "healthcheck.yaml").write_text(
        "version: 1\nextends: [base.yaml]\nsettings: {mode: observe}\nrules:\n  loss-not-finite: {for: 2}\n"
    )
    code, out, _ = command("check", "--print-config", "healthcheck.yaml")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "metric: loss # base.yaml:3" in lines
    assert "for: 2 # healthcheck.yaml:5" in lines
    assert "mode: observe # healthcheck.yaml:3" in lines


def test_what_is_printed_as_config_can_be_loaded_again(command, tmp_path) -> None:
    (tmp_path / "healthcheck.yaml").write_text("version: 1\nextends: [healthcheck:recommended]\nrules: {}\n")
    _, out, _ = command("check", "--print-config", "healthcheck.yaml")
    config = out[out.index("version: 1") :]
    (tmp_path / "again.yaml").write_text(config)
    code, out, _ = command("check", "again.yaml")
    assert code == 0, out


def test_a_folder_is_searched_for_rule_files(command, tmp_path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "team.yaml").write_text(BAD)
    (tmp_path / "a" / "healthcheck-ci.yaml").write_text(GOOD)
    (tmp_path / "a" / "compose.yaml").write_text("services: {}\n")
    code, out, _ = command("check", "-q", ".")
    assert code == 4
    assert {line.split(":")[0] for line in out.splitlines()} == {"a/team.yaml"}


@pytest.mark.parametrize(
    ("name", "answer"),
    [("train.py", "healthcheck run"), ("log.csv", "healthcheck replay"), ("a.hctest.yaml", "healthcheck test")],
)
def test_a_wrong_guess_gets_the_right_line(command, tmp_path, name, answer) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(UsageError, match=answer):
        command("check", name)


def test_a_folder_of_a_run_is_answered_with_replay(command, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples.jsonl").write_text("")
    with pytest.raises(UsageError, match="healthcheck replay"):
        command("check", "run")


def test_schema_prints_and_installs_the_schema(command, tmp_path) -> None:
    code, out, _ = command("schema")
    assert code == 0
    assert "robust_z" in json.loads(out)["definitions"]["condition"]["properties"]
    code, out, _ = command("schema", "--install")
    assert code == 0
    installed = tmp_path / "healthcheck-rules.v1.schema.json"
    assert json.loads(installed.read_text())["title"]
    assert f"# yaml-language-server: $schema=./{installed.name}" in out


def test_explain_shows_the_rule_as_it_stands_here(command, tmp_path) -> None:
    (tmp_path / "healthcheck.yaml").write_text(
        "version: 1\nextends: [healthcheck:recommended]\nrules:\n  exploding-gradient: {enabled: true, for: 5}\n"
    )
    code, out, _ = command("explain", "exploding-gradient")
    assert code == 0
    assert "asks      grad.layer_ratio" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "for: 5 # healthcheck.yaml:4" in lines
    assert "fails CI: no, stops: no" in out


def test_explain_knows_conditions_and_settings_and_answers_typos(command) -> None:
    assert "min_ratio" in command("explain", "robust_z")[1]
    assert "HEALTHCHECK_FAIL_ON" in command("explain", "fail_on")[1]
    with pytest.raises(HealthCheckError, match='did you mean "spike"'):
        command("explain", "spik")


def test_explain_alone_lists_every_rule_in_one_line_each(command) -> None:
    code, out, _ = command("explain")
    assert code == 0
    assert any(line.split()[:2] == ["loss-not-finite", "error"] for line in out.splitlines())


def test_advice_about_a_pack_that_is_only_extended_is_not_for_its_user(command, tmp_path) -> None:
    """A file fresh from `init` must not be answered with warnings about files of ours."""
    assert command("init")[0] == 0
    code, out, _ = command("check")
    assert (code, "warning" in out) == (0, False), out


def test_fix_goes_on_with_what_hid_behind_a_mistake(command, tmp_path) -> None:
    text = "version: 1\nrules: {a: {metric: memory.fraction, when: {greater_than: 92}, severity: critical}}\n"
    (tmp_path / "healthcheck.yaml").write_text(text)
    code, out, _ = command("check", "--fix")
    assert code == 0, out
    assert (tmp_path / "healthcheck.yaml").read_text().splitlines()[1] == (
        "rules: {a: {metric: memory.fraction, when: {above: 92%}, severity: error}}"
    )


def test_mistakes_are_shown_by_plan_as_by_check(tmp_path, monkeypatch, capsys) -> None:
    from healthcheck.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "healthcheck.yaml").write_text("version: 1\nrules: {a: {metric: lss, when: {above: 3}}}\n")
    assert main(["plan"]) == 4
    err = capsys.readouterr().err
    assert "    2 | rules: {a: {metric: lss, when: {above: 3}}}\n      |                     ^^^\n" in err
    assert err.endswith("1 error; nothing was run\n")


def test_a_file_of_somebody_else_is_named_and_left_alone(command, tmp_path) -> None:
    (tmp_path / "healthcheck.yaml").write_text("services: {web: {interval: 30s}}\n")
    code, out, err = command("plan")
    assert code == 0
    assert "has no `version:`, so it is not a healthcheck file; skipped" in err
    assert "healthcheck:recommended" in out


def test_a_change_to_a_rule_that_some_profile_switches_off_is_no_mistake(command, tmp_path) -> None:
    text = "version: 1\nextends: [healthcheck:recommended]\nrules: {spike.loss: {severity: error}}\n"
    (tmp_path / "healthcheck.yaml").write_text(text)
    code, out, _ = command("check")
    assert (code, "switched off" in out) == (0, False), out


def test_kinds_of_reports_in_the_settings_are_checked_with_their_place(command, tmp_path) -> None:
    text = "version: 1\nsettings:\n  report: [junit=hc.xml, jnuit=b.xml, json]\nrules: {}\n"
    (tmp_path / "healthcheck.yaml").write_text(text)
    code, out, _ = command("check", "-q", "healthcheck.yaml")
    assert code == 4
    assert 'healthcheck.yaml:3:26: error[bad-report]: there is no report "jnuit"; did you mean "junit"?' in out
    assert "healthcheck.yaml:3:39: error[bad-report]: json needs a path, for instance json=healthcheck.json" in out
