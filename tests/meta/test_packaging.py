"""pyproject.toml lists packages by hand, because the packs live outside the package folder."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def listed_packages() -> set[str]:
    # Python 3.10 has no tomllib; the list is ours and plain.
    block = re.search(r"^packages = \[\n(.*?)^\]", PYPROJECT, re.DOTALL | re.MULTILINE)
    assert block is not None
    return set(re.findall(r'"([\w.]+)"', block[1]))


def test_every_package_folder_is_in_the_wheel() -> None:
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "healthcheck").rglob("__init__.py")}
    assert folders | {"healthcheck.rulepacks", "healthcheck.rulepages"} == listed_packages()


def test_the_packs_are_a_package() -> None:
    """Without an __init__.py an editable install does not find a package that lies elsewhere."""
    assert (ROOT / "rules" / "__init__.py").is_file()
    assert (ROOT / "docs" / "rules" / "__init__.py").is_file()


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "healthcheck" / "py.typed").is_file()


def test_the_version_is_the_same_everywhere() -> None:
    import healthcheck

    written = re.search(r'^version = "(.+)"', PYPROJECT, re.MULTILINE)
    assert written is not None
    assert healthcheck.__version__ == written[1]
    assert version("torch-healthcheck") == written[1]
