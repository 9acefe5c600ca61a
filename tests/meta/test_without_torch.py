"""Commands that read and write rules and records work where torch is not installed.

A login node, a laptop and a lint job should not need gigabytes. The environment here is a real
one: it holds this package and the requirements of pyproject.toml, with theirs, except torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
WITHOUT = "torch"
MAIN = "import sys; from healthcheck.cli import main; sys.exit(main())"


def closure(name: str, found: dict[str, Distribution]) -> dict[str, Distribution]:
    """A distribution and everything it requires here, by name, without torch and what only torch needs."""
    if name.lower() not in found and name != WITHOUT:
        found[name.lower()] = distribution(name)
        for line in found[name.lower()].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                closure(requirement.name, found)
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("no-torch")
    venv.create(folder / "venv", with_pip=False, symlinks=os.name != "nt")
    python = folder / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
    ours = closure("torch-healthcheck", {})
    del ours["torch-healthcheck"]
    for dist in ours.values():
        for top in {path.parts[0] for path in dist.files or () if path.parts[0] not in ("..", "__pycache__")}:
            source = Path(str(dist.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    (site / "healthcheck_checkout.pth").write_text(f"{ROOT}\n")
    return python


def run(python: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HEALTHCHECK", "PYTHON"))}
    env["HEALTHCHECK_RUNS"] = str(folder / "runs")
    command = [python, "-c", MAIN, *args]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_torch_is_really_missing_there(python: Path) -> None:
    result = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    assert "No module named 'torch'" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [("--help",), ("check", "rules.yaml"), ("metrics",), ("explain", "loss-not-finite"), ("plugins",), ("init",)],
    ids=" ".join,
)
def test_a_command_about_rules_needs_no_torch(python: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    (tmp_path / "rules.yaml").write_text("version: 1\nextends: [healthcheck:recommended]\n")
    result = run(python, tmp_path, *args)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_a_record_made_with_torch_is_explained_without_it(python: Path, tmp_path: Path) -> None:
    """The record is written on the cluster and read on the login node."""
    script = ROOT / "examples" / "train.py"
    watched = subprocess.run(
        [sys.executable, "-c", MAIN, "run", str(script), "--nan-at", "20"],
        cwd=tmp_path,
        env={**os.environ, "HEALTHCHECK_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert watched.returncode == 1, watched.stderr
    result = run(python, tmp_path, "why")
    assert result.returncode == 0, result.stderr
    assert "loss-not-finite" in result.stdout
    for args in (("top",), ("metrics", "latest"), ("report",), ("report", "--format", "html"), ("runs",)):
        result = run(python, tmp_path, *args)
        assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_run_without_torch_says_what_is_missing(python: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')\n")
    result = run(python, tmp_path, "run", "train.py")
    assert result.returncode != 0
    assert "torch" in result.stderr
    assert "Traceback" not in result.stderr
