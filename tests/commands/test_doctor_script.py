"""``healthcheck doctor train.py``: real processes, with and without us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

SCRIPT = """
import sys
import torch

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
if "--unseeded" in sys.argv:
    torch.seed()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(1000):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "same"), [(["3"], True), (["3", "--unseeded"], None)])
def test_losses_are_compared_and_memory_and_time_reported(
    healthcheck_command: Any, tmp_path: Path, arguments: list[str], same: bool | None
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = healthcheck_command("doctor", "--format", "json", "--steps", "8", "train.py", *arguments)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)["measured"]
    assert measured["steps"] == 8
    assert measured["ratio"] > 0
    assert measured["host_memory"]["watched"] > 0
    assert measured["identical_losses"] is same


def test_a_script_that_is_not_there_or_does_not_run_is_a_usage_error(healthcheck_command: Any, tmp_path: Path) -> None:
    missing = healthcheck_command("doctor", "nowhere.py")
    assert missing.returncode == 4
    assert "no such script: nowhere.py" in missing.stderr
    (tmp_path / "broken.py").write_text("raise KeyError('data')\n")
    broken = healthcheck_command("doctor", "broken.py")
    assert broken.returncode == 4
    assert "did not run on its own" in broken.stderr
    assert "KeyError: 'data'" in broken.stderr
