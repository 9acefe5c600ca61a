"""Which rules a run uses when nobody says so."""

from __future__ import annotations

import sys

import pytest

from healthcheck.core.errors import RuleFileError, UsageError
from healthcheck.rulelang import discover as module
from healthcheck.rulelang.discover import discover

OURS = "version: 1\nrules: {}\n"
FOREIGN = "services:\n  web: {image: nginx}\n"


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """A repository with a nested working directory."""
    (tmp_path / ".git").mkdir()
    inner = tmp_path / "pkg" / "train"
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    return tmp_path


def found(**environ: str):
    return discover(environ=environ)


def test_nothing_found_means_the_recommended_pack(repo) -> None:
    result = found()
    assert result.sources == ["healthcheck:recommended"]
    assert result.label == "healthcheck:recommended (no config found)"


def test_the_nearest_file_up_to_the_repository_root_is_used(repo) -> None:
    (repo / "healthcheck.yaml").write_text(OURS)
    assert found().sources == [str(repo / "healthcheck.yaml")]
    (repo / "pkg" / "healthcheck.yaml").write_text(OURS)
    assert found().sources == [str(repo / "pkg" / "healthcheck.yaml")], "two found files are never merged"


def test_a_file_above_the_repository_is_not_looked_at(repo, monkeypatch) -> None:
    (repo / "healthcheck.yaml").write_text(OURS)
    inner = repo / "pkg"
    (inner / ".git").mkdir()
    assert found().label.endswith("(no config found)")


def test_outside_of_a_repository_only_the_working_directory_counts(tmp_path, monkeypatch) -> None:
    (tmp_path / "healthcheck.yaml").write_text(OURS)
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    assert found().label.endswith("(no config found)")


@pytest.mark.parametrize("text", [FOREIGN, 'version: "3.8"\nservices: {}\n', "", "- a\n", "a: [\n"])
def test_a_file_that_is_not_ours_is_named_and_skipped(repo, text) -> None:
    (repo / "pkg" / "train" / "healthcheck.yaml").write_text(text)
    (repo / "healthcheck.yaml").write_text(OURS)
    result = found()
    assert result.sources == [str(repo / "healthcheck.yaml")]
    assert len(result.notes) == 1
    assert result.notes[0].startswith("healthcheck.yaml ")
    assert result.notes[0].endswith("skipped")


@pytest.mark.parametrize("text", ["version: 1\nrules: [\n", "version: 2\nrules: {}\n"])
def test_a_broken_file_of_ours_is_used_so_that_its_errors_are_seen(repo, text) -> None:
    (repo / "healthcheck.yaml").write_text(text)
    assert found().sources == [str(repo / "healthcheck.yaml")]


def test_given_rules_replace_what_could_be_found(repo) -> None:
    (repo / "healthcheck.yaml").write_text(OURS)
    assert discover("other.yaml").sources == ["other.yaml"]
    assert discover(["a.yaml", "healthcheck:ci-smoke"]).label == "a.yaml, healthcheck:ci-smoke"
    assert discover({"a": {}}).label == "rules from code"
    assert discover(str(repo)).sources == [str(repo / "healthcheck.yaml")]


def test_the_environment_beats_the_file(repo) -> None:
    (repo / "healthcheck.yaml").write_text(OURS)
    assert found(HEALTHCHECK_RULES="a.yaml,b.yaml").sources == ["a.yaml", "b.yaml"]
    assert found(HEALTHCHECK_RULES="healthcheck:recommended@1").sources == ["healthcheck:recommended@1"]


PYPROJECT = """\
[project]
name = "x"

[tool.healthcheck]
mode = "observe"   # for now
keep = 7
rules = ["team.yaml", 'healthcheck:recommended']
plugins = ["tools/health.py", "pkg.health"]

[tool.other]
mode = "act"
"""


def test_pyproject_gives_settings_rules_and_plugins(repo) -> None:
    (repo / "pyproject.toml").write_text(PYPROJECT)
    result = found()
    assert result.settings == {"mode": "observe", "keep": 7}
    assert result.sources == [str(repo / "team.yaml"), "healthcheck:recommended"]
    assert module.configured_plugins() == [str(repo / "tools/health.py"), "pkg.health"]
    assert result.setting_origins["mode"].path.endswith("pyproject.toml")


def test_a_rule_file_beats_pyproject(repo) -> None:
    (repo / "pyproject.toml").write_text(PYPROJECT)
    (repo / "healthcheck.yaml").write_text(OURS)
    assert found().settings == {}


def test_a_pyproject_without_our_table_is_none_of_our_business(repo) -> None:
    (repo / "pyproject.toml").write_text("[tool.other]\nhealthcheck = true\n")
    assert found().label.endswith("(no config found)")


@pytest.mark.parametrize("line", ['mode = "obsrve"', 'mod = "act"', "rules = 5", "keep = 0"])
def test_mistakes_in_pyproject_name_their_key(repo, line) -> None:
    (repo / "pyproject.toml").write_text(f"[tool.healthcheck]\n{line}\n")
    with pytest.raises(RuleFileError, match=r"pyproject.toml: tool.healthcheck.\w+: error"):
        found()


def test_a_list_may_stand_in_several_lines(repo) -> None:
    (repo / "pyproject.toml").write_text('[tool.healthcheck]\nrules = [\n  "a.yaml",\n  "b.yaml",\n]\n')
    assert found().sources == [str(repo / "a.yaml"), str(repo / "b.yaml")]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there it is tomli")
def test_toml_is_read_by_a_library_on_python_3_10_too(repo, monkeypatch) -> None:
    """The requirement on tomli holds for Python 3.10 only; it has the names of tomllib."""
    import tomllib

    monkeypatch.setattr(module.sys, "version_info", (3, 10))
    monkeypatch.setitem(sys.modules, "tomli", tomllib)
    (repo / "pyproject.toml").write_text(PYPROJECT)
    assert found().settings == {"mode": "observe", "keep": 7}


def test_broken_toml_is_a_usage_error(repo) -> None:
    (repo / "pyproject.toml").write_text("[tool.healthcheck\nmode=")
    with pytest.raises(UsageError, match="not valid TOML"):
        found()


def test_plugins_of_pyproject_count_beside_a_rule_file(repo) -> None:
    """A rule file cannot name plugins, so they must be found where it wins."""
    (repo / "pyproject.toml").write_text(PYPROJECT)
    (repo / "healthcheck.yaml").write_text(OURS)
    assert module.configured_plugins() == [str(repo / "tools/health.py"), "pkg.health"]
    (repo / "pyproject.toml").write_text("[tool.healthcheck\n")
    assert module.configured_plugins() == []
