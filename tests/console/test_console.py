"""What ten small scripts print at 80 columns, word for word: healthy ones, broken ones and two that never train.

``HEALTHCHECK_UPDATE_GOLDEN=1`` (``make golden``) writes the expected texts again: read the difference as a stranger would.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SCRIPTS = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("test_"))
HEALTHY = [name for name in SCRIPTS if name.endswith("_healthy")]
ARGUMENTS = {"only_help": ["--help"]}


def normalised(text: str) -> str:
    """Without what differs from machine to machine: times, and the last digits of measured numbers."""
    text = re.sub(r" in [\d.]+ (s|m \d+ s)\b", " in T", text)
    text = re.sub(r", cost [\d.]+ %", ", cost N %", text)
    text = re.sub(r"(?<![\w.-])\d[\d,]*\.\d+(e[+-]?\d+)?(?!\.\d)|(?<![\w.-])\d+e[+-]?\d+", "N", text)
    text = re.sub(r"\bN(\.\d+)+", "VERSION", text)
    # The exit code stands at its column whatever stands before it.
    return re.sub(r" {2,}(exit \d+)$", r"  \1", text, flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_what_a_script_prints_reads_as_it_did(name: str, healthcheck_warm: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text((HERE / f"{name}.py").read_text())
    result = healthcheck_warm("run", "train.py", *ARGUMENTS.get(name, []), cwd=tmp_path, env={"COLUMNS": "80"})
    text, golden = result.stderr, HERE / f"{name}.txt"
    assert max(map(len, text.splitlines())) <= 80
    if os.environ.get("HEALTHCHECK_UPDATE_GOLDEN"):
        golden.write_text(normalised(text))
    assert normalised(text) == golden.read_text()


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_script_gets_two_lines_at_the_start_and_three_at_the_end(name: str) -> None:
    lines = (HERE / f"{name}.txt").read_text().splitlines()
    assert len(lines) <= 5
    assert lines[2].startswith("healthcheck: OK, ")
    assert " checks that apply were judged" in lines[3]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in HEALTHY])
def test_no_other_script_is_called_ok(name: str) -> None:
    assert "healthcheck: OK" not in (HERE / f"{name}.txt").read_text()


def test_no_sentence_stands_in_every_block() -> None:
    blocks = [
        block
        for name in SCRIPTS
        for block in re.findall(r"^(?:WARN|ERROR).*\n(?: {6}.*\n)*", (HERE / f"{name}.txt").read_text(), re.MULTILINE)
    ]
    assert len(blocks) >= 4
    shared = set.intersection(*({line.strip() for line in block.splitlines()[1:]} for block in blocks))
    assert shared == set()
    assert all(block.count("\n") <= 5 for block in blocks)
