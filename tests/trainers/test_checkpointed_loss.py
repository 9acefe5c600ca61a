"""Activation checkpointing round the loss: looking at what its graph keeps must not run that part of the model anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
body, head, other = nn.Linear(8, 16), nn.Linear(16, 10), nn.Linear(16, 10)
optimizer = torch.optim.SGD([p for m in (body, head, other) for p in m.parameters()], 0.01)
calls = 0
LOSSES = {
    "classes": lambda a, b, y: F.cross_entropy(a, y),
    "numbers": lambda a, b, y: F.mse_loss(a, b.detach()) / 2,
    "sides": lambda a, b, y: F.binary_cross_entropy_with_logits(a, (b > 0).float()),
    "angles": lambda a, b, y: (1 - (F.normalize(a, dim=1) * F.normalize(b, dim=1)).sum(1)).mean(),
    "distances": lambda a, b, y: (a - b).norm(dim=1).mean(),
    "code": lambda a, b, y: (a.exp() + b.square() - 1 - a).sum(1).mean() / 2 + F.mse_loss(a, b),
    "by hand": lambda a, b, y: -(torch.softmax(a, 1)[torch.arange(16), y] + 1e-6).log().mean(),
}
loss_of = LOSSES[sys.argv[1]]


def part(z, y):
    global calls
    calls += 1
    return loss_of(head(z), other(z), y)


for step in range(60):
    x, y = torch.randn(16, 8), torch.randint(0, 10, (16,))
    optimizer.zero_grad()
    loss = checkpoint(part, body(x), y, use_reentrant=False)
    loss.backward()
    optimizer.step()
print(calls)
"""


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["classes", "numbers", "sides", "angles", "distances", "code", "by hand"])
def test_a_checkpointed_loss_runs_as_often_as_without_us(
    healthcheck_warm: Callable[..., Any], tmp_path: Path, loss: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = healthcheck_warm("run", "--rules", "healthcheck:strict", "--observe", "train.py", loss)
    assert done.stdout.split() == ["120"], done.stderr
