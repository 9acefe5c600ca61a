"""`import healthcheck` costs nothing, and every module can be imported alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "healthcheck"
HEAVY = ("torch", "yaml", "jsonschema", "rich", "pytest", "transformers", "accelerate", "lightning", "numpy")

NEEDS_A_FRAMEWORK: frozenset[str] = frozenset(
    {
        "healthcheck.trainers.huggingface.callback",  # its callback has the base class of transformers
        "healthcheck.trainers.huggingface.memory",
        "healthcheck.trainers.lightning.callback",  # that of Lightning
        "healthcheck.trainers.lightning.single",
        "healthcheck.device.gradient_kernel",  # Triton, which comes with torch's CUDA and ROCm builds
        "healthcheck.device.sample_kernel",
    }
)
"""Modules that cannot be imported without an optional framework. A reason belongs beside each."""


def modules() -> list[str]:
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        pieces = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        if pieces[-1] == "__init__":
            pieces.pop()
        if pieces[-1] != "__main__":
            names.append(".".join(pieces))
    return names


def python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=600)


def test_importing_the_package_loads_nothing_heavy() -> None:
    """A script that only calls healthcheck.log() must not pay for rule files, tables or pytest."""
    result = python(f"import sys, healthcheck; print([m for m in {HEAVY} if m in sys.modules])")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_every_public_name_resolves() -> None:
    result = python("import healthcheck\nfor name in healthcheck.__all__: getattr(healthcheck, name)", "-W", "error")
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("start", range(4))
def test_each_module_imports_alone_without_warnings_and_without_torch(start: int) -> None:
    """Alone: no module may rely on another having been imported before. A quarter of them per process.

    Each module is imported into an interpreter from which ours have been removed again, which
    is what a fresh process would give, for a fortieth of the time.
    """
    names = [name for name in modules()[start::4] if name not in NEEDS_A_FRAMEWORK]
    code = f"""
import importlib, sys
for name in {names!r}:
    for loaded in [m for m in sys.modules if m.split(".")[0] == "healthcheck"]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except BaseException as error:
        sys.exit(f"{{name}}: {{type(error).__name__}}: {{error}}")
    if "torch" in sys.modules:
        sys.exit(f"{{name}}: imports torch at module level")
"""
    result = python(code, "-W", "error")
    assert result.returncode == 0, result.stderr
