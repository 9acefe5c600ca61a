"""``healthcheck plugins new``: a distribution that works at once, here and from its wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def made(healthcheck_here: Callable[..., Any], tmp_path: Path) -> Path:
    result = healthcheck_here("plugins", "new", "acme-health", "--dir", "here")
    assert result.returncode == 0, result.stderr
    return tmp_path / "here" / "acme-health"


def test_it_writes_a_file_for_each_part_and_says_what_to_do_next(made: Path) -> None:
    files = {path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file()}
    parts = {f"acme_health/{name}.py" for name in ("__init__", "probe", "condition", "action", "report", "reader")}
    assert parts | {"pyproject.toml", "README.md", "tests/test_plugin.py", "acme_health/packs/starter.yaml"} <= files
    assert not [name for name in files if "@" in (made / name).read_text() and "@PACKAGE@" in (made / name).read_text()]


def test_it_uses_public_names_only(made: Path, helper: Callable[[str], ModuleType]) -> None:
    """What it imports is promised to last; everything else of the package may move."""
    private_uses = helper("tests/plugins/public_names.py").private_uses
    assert {
        path.name: private_uses(path.read_text()) for path in made.rglob("*.py") if private_uses(path.read_text())
    } == {}
    assert private_uses("from healthcheck.core.protocols import Probe") == ["healthcheck.core.protocols.Probe"]
    assert private_uses("import healthcheck\nhealthcheck.assembly") == ["healthcheck.assembly"]


@pytest.mark.slow
def test_its_own_tests_pass_where_it_was_written(made: Path) -> None:
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(command, cwd=made, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("2fast", "letters, digits"),
        ("a--b", "letters, digits"),
        ("json", "which is taken"),
        ("healthcheck", "which is taken"),
    ],
)
def test_a_bad_name_is_refused_and_nothing_is_written(
    healthcheck_here: Callable[..., Any], tmp_path: Path, name: str, said: str
) -> None:
    result = healthcheck_here("plugins", "new", name)
    assert result.returncode == 4
    assert said in result.stderr
    assert not (tmp_path / name).exists()


def test_an_existing_folder_is_left_alone(healthcheck_here: Callable[..., Any], made: Path) -> None:
    (made / "README.md").write_text("mine")
    result = healthcheck_here("plugins", "new", "acme-health", "--dir", made.parent)
    assert result.returncode == 4
    assert (made / "README.md").read_text() == "mine"


@pytest.mark.slow
def test_from_its_wheel_in_a_clean_environment_every_part_is_visible_and_usable(
    made: Path, tmp_path: Path, helper: Callable[[str], ModuleType]
) -> None:
    """What somebody else gets who installs it."""
    build, clean_venv = (
        helper("tests/plugins/test_example_distribution.py").build,
        helper("tests/plugins/clean_venv.py"),
    )
    out = tmp_path / "dist"
    out.mkdir()
    wheels = [build(source, out, tmp_path) for source in (ROOT, made)]
    folder = tmp_path / "clean"
    folder.mkdir()
    with zipfile.ZipFile(wheels[1]) as wheel:
        sources = {name: wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py")}
    assert len(sources) == 6
    private_uses = helper("tests/plugins/public_names.py").private_uses
    assert [use for source in sources.values() for use in private_uses(source)] == []
    environment = clean_venv.CleanEnvironment(folder, wheels)
    shutil.copytree(made / "tests", folder / "tests")  # away from the sources: the installed package is tested
    tests = environment.run(environment.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert tests.returncode == 0, tests.stdout + tests.stderr
    listed = environment.command("plugins")
    assert "acme_health   entry point of acme-health 0.1.0" in listed
    for part in (
        "probes: acme_health-weight-norm",
        "metrics: acme_health.weight_norm",
        "conditions: acme_health.grown",
        "actions: acme_health.touch",
        "reports: acme_health.table",
        "readers: acme_health",
        "packs: acme_health:starter",
    ):
        assert part in " ".join(listed.split())
    (folder / "healthcheck.yaml").write_text(
        'version: 1\nextends: ["acme_health:starter"]\nsettings: {report: [acme_health.table=table.txt]}\n'
        "rules:\n"
        "  weights-grow: {when: {acme_health.grown: 1.5}, severity: error, then: [{acme_health.touch: {path: touched}}]}\n"
    )
    environment.command("check", "healthcheck.yaml")
    (folder / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "for _ in range(5):\n    model(torch.ones(1, 2)).sum().backward()\n    optimizer.step()\n"
        "    with torch.no_grad():\n        [p.mul_(2) for p in model.parameters()]\n"
    )
    text = environment.command("run", "train.py", expect=1)
    assert "weights-grow" in text
    assert (folder / "touched").is_file()
    assert "weights-grow: failed" in (folder / "table.txt").read_text()
    (folder / "run.log").write_text(
        "# acme_health log\n" + "".join(f"{n} acme_health.weight_norm={n}\n" for n in range(1, 9))
    )
    replayed = environment.command("replay", "run.log", expect=1)
    assert "weights-grow" in replayed
