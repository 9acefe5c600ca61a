"""The example plugin from its own wheel, found through its entry point."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# By path: under importmode=importlib test folders are no packages.
_spec = importlib.util.spec_from_file_location("clean_venv", HERE / "clean_venv.py")
assert _spec is not None
assert _spec.loader is not None
clean_venv = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(clean_venv)


def build(source: Path, out: Path, scratch: Path) -> Path:
    """Build a wheel from a copy, so that no ``build/`` folder is left in the checkout."""
    copy = scratch / source.name
    ignore = shutil.ignore_patterns(
        ".venv*", ".git", "healthcheck-runs", "build", "dist", "*.egg-info", ".*_cache", "__pycache__"
    )
    shutil.copytree(source, copy, ignore=ignore)
    before = set(out.glob("*.whl"))
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(copy)],
        check=True,
        capture_output=True,
        text=True,
    )
    [wheel] = set(out.glob("*.whl")) - before
    return wheel


@pytest.mark.slow
def test_both_wheels_work_in_a_clean_environment(tmp_path: Path) -> None:
    """What a user's `pip install` gives, not what the checkout happens to hold."""
    out = tmp_path / "dist"
    out.mkdir()
    wheels = [build(source, out, tmp_path) for source in (ROOT, ROOT / "plugins" / "healthcheck-example")]
    folder = tmp_path / "clean"
    folder.mkdir()
    clean_venv.prove(clean_venv.CleanEnvironment(folder, wheels))
