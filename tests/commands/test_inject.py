"""``healthcheck run --inject``: rehearse one's alarms."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

TRAIN = """\
import torch
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 2)).pow(2).mean()
    loss.backward()
    optimizer.step()
print("done")
"""


def test_the_fault_is_told_fires_its_rule_and_stands_in_the_report(
    healthcheck_warm: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    result = healthcheck_warm("run", "--inject", "nan-grad@4", "--report", "json=hc.json", "train.py")
    assert result.returncode == 1
    assert "healthcheck: injected nan-grad at step 4" in result.stderr
    assert "ERROR grads-not-finite.in-one-step  step 4" in result.stderr
    report = json.loads((tmp_path / "hc.json").read_text())
    assert report["injected"] == [{"fault": "nan-grad@4", "happened": True, "step": 4}]


def test_a_fault_that_never_came_about_is_told_and_changes_nothing(
    healthcheck_warm: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    result = healthcheck_warm("run", "--inject", "nan-grad@400", "--inject", "slow-data@2", "train.py")
    assert (result.returncode, result.stdout) == (0, "done\n")
    assert "nan-grad@400 never took effect: the run had 10 steps" in result.stderr
    assert "slow-data@2 never took effect: no DataLoader gave a batch" in result.stderr


def test_a_mistake_is_told_before_anything_runs(healthcheck_warm: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    result = healthcheck_warm("run", "--inject", "nan-grd@4", "train.py")
    assert (result.returncode, result.stdout) == (4, "")
    assert 'did you mean "nan-grad"?' in result.stderr
