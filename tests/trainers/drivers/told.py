"""What the tests of the driven trainers share: a model whose loss can go bad, and its batches."""

from __future__ import annotations

from typing import Any

import torch


class Model(torch.nn.Linear):
    """Its loss is NaN in training forward pass number ``bad`` (from 1)."""

    def __init__(self, bad: int = 0) -> None:
        torch.manual_seed(0)
        super().__init__(3, 1)
        self.bad, self.seen = bad, 0

    def forward(self, x: Any) -> Any:
        self.seen += self.training
        loss = super().forward(x).square().mean()
        return {"loss": loss * float("nan") if self.training and self.seen == self.bad else loss}


def batches(n: int = 20) -> list[Any]:
    """No two alike: ones, twos, threes, ..."""
    return [{"x": torch.ones(2, 3) * (i + 1)} for i in range(n)]
