"""A process that trains twice: the second training is seen as the first was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import torch
from torch import nn

def train(steps):
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(steps):
        x = torch.randn(16, 4)
        optimizer.zero_grad()
        (net(x) - x[:, :1]).square().mean().backward()
        optimizer.step()

torch.manual_seed(0)
train(100)
train(60)
"""


@pytest.mark.slow
def test_an_optimizer_that_follows_one_which_the_script_let_go_is_the_first_again(
    tmp_path: Path, healthcheck_warm: Callable[..., Any]
) -> None:
    """Samples that waited to be judged held on to the one before, and many probes look at the first optimizer only."""
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = healthcheck_warm("run", "train.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    recorded = (tmp_path / "runs" / "latest" / "samples.jsonl").read_text()
    assert '"step":160' in recorded
    assert "optimizer=1" not in recorded
