"""docs/reference/report.md names every key that a real report holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "report.md"
SCRIPT = PAGE.parents[2] / "examples" / "train.py"


@pytest.fixture(scope="module")
def documented() -> dict[str, set[str]]:
    """Keys in the first column of each section's table."""
    found: dict[str, set[str]] = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, body = section.split("\n", 1)
        cells = re.findall(r"^\| (`[^|]+`) \|", body, flags=re.MULTILINE)
        found[title] = {key for cell in cells for key in re.findall(r"`(\w+)`", cell)}
    return found


@pytest.mark.slow
def test_every_key_of_a_report_is_documented(
    healthcheck_warm: Callable[..., Any], tmp_path: Path, documented: dict[str, set[str]]
) -> None:
    target = tmp_path / "report.json"
    result = healthcheck_warm("run", "--report", f"json={target}", SCRIPT, "--nan-at", "20")
    assert result.returncode == 1, result.stderr
    report = json.loads(target.read_text(encoding="utf-8"))
    assert set(report) <= documented["Top level"]
    assert {key for rule in report["rules"].values() for key in rule} <= documented["A rule"]
    assert report["alerts"]
    assert {key for alert in report["alerts"] for key in alert} <= documented["An alert"]


@pytest.mark.slow
def test_a_report_is_strict_json(healthcheck_warm: Callable[..., Any], tmp_path: Path) -> None:
    """NaN in a report is what the reader of a report most wants to know, and least wants to crash on."""
    target = tmp_path / "report.json"
    healthcheck_warm("run", "--report", f"json={target}", SCRIPT, "--nan-at", "20")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    report = json.loads(target.read_text(encoding="utf-8"), parse_constant=refuse)
    assert report["alerts"][0]["value"] == "nan"
