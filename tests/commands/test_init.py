"""``healthcheck init``: a file that is valid, short, and never overwrites."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]


def test_the_written_file_is_valid_and_short(healthcheck_here: Run, tmp_path: Path) -> None:
    done = healthcheck_here("init")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "healthcheck.yaml").read_text()
    assert len(text.splitlines()) <= 24
    checked = healthcheck_here("check")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_commented_example_is_valid_as_well(healthcheck_here: Run, tmp_path: Path) -> None:
    """A reader takes the hash signs away; that must not be the moment of the first error."""
    healthcheck_here("init")
    path = tmp_path / "healthcheck.yaml"
    lines = path.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if "kl-too-high" in line)
    lines[start:] = [line.replace("# ", "", 1) for line in lines[start:]]
    path.write_text("\n".join(lines) + "\n")
    checked = healthcheck_here("check")
    assert checked.returncode == 0, checked.stdout + checked.stderr + path.read_text()


def test_the_schema_lies_beside_it_and_the_first_line_points_there(healthcheck_here: Run, tmp_path: Path) -> None:
    healthcheck_here("init")
    first = (tmp_path / "healthcheck.yaml").read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=./healthcheck-rules.v1.schema.json"
    schema = json.loads((tmp_path / "healthcheck-rules.v1.schema.json").read_text())
    assert "rules" in schema["properties"]


def test_observe_writes_observe_mode(healthcheck_here: Run, tmp_path: Path) -> None:
    healthcheck_here("init", "--observe")
    import yaml

    assert yaml.safe_load((tmp_path / "healthcheck.yaml").read_text())["settings"]["mode"] == "observe"


def test_it_never_overwrites_without_force(healthcheck_here: Run, tmp_path: Path) -> None:
    path = tmp_path / "healthcheck.yaml"
    path.write_text("version: 1\nrules: {}\n")
    done = healthcheck_here("init")
    assert done.returncode == 4
    assert "--force" in done.stderr
    assert path.read_text() == "version: 1\nrules: {}\n"
    assert healthcheck_here("init", "--force").returncode == 0
    assert "recommended" in path.read_text()


def test_a_project_with_settings_in_pyproject_is_told_which_file_wins(healthcheck_here: Run, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.healthcheck]\nfail_on = "warning"\n')
    done = healthcheck_here("init")
    assert done.returncode == 0
    assert "[tool.healthcheck] of pyproject.toml" in done.stdout


def test_an_unwritable_folder_is_one_clear_error(healthcheck_here: Run, tmp_path: Path) -> None:
    (tmp_path / "healthcheck.yaml").mkdir()
    done = healthcheck_here("init", "--force")
    assert done.returncode == 4
    assert "cannot write here" in done.stderr
    assert "Traceback" not in done.stderr
