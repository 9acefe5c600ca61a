"""``HEALTHCHECK_TRACE=1``: which plugin was called, when, and how long it took."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

TRAIN = """\
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 2)).pow(2).mean().backward()
    optimizer.step()
"""
PLUGIN = """\
import healthcheck
@healthcheck.hookimpl
def healthcheck_step_end(event):
    if event.step == 2:
        raise RuntimeError("oh")
"""


def test_each_call_of_a_hook_is_a_line_on_stderr(healthcheck_warm: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "mine.py").write_text(PLUGIN)
    result = healthcheck_warm("run", "-p", "mine.py", "train.py", env={"HEALTHCHECK_TRACE": "1"})
    lines = [line for line in result.stderr.splitlines() if line.startswith("trace: ")]
    assert any(line.startswith("trace: plugin mine (mine.py): step_end") for line in lines)
    calls = [line for line in lines if "step_end -> mine" in line]
    assert re.fullmatch(r"trace: step 1 step_end -> mine \(\d+ us\)", calls[0])
    assert calls[1] == "trace: step 2 step_end -> mine (RAISED RuntimeError)"
    assert result.stdout == ""


def test_without_the_variable_nothing_is_traced(healthcheck_warm: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    result = healthcheck_warm("run", "train.py", env={"HEALTHCHECK_TRACE": "0"})
    assert "trace" not in result.stderr
