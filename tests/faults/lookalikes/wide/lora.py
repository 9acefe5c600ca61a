"""Adapters with B at zero on a frozen base; all parameters are given to the optimizer, the frozen ones too."""

import argparse

import torch
from torch import nn

STEPS = 250


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        Adapted(nn.Linear(16, 64)), nn.ReLU(), Adapted(nn.Linear(64, 64)), nn.ReLU(), Adapted(nn.Linear(64, 4))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    teacher = torch.randn(16, 4, generator=data)
    for _ in range(steps):
        x = torch.randn(64, 16, generator=data)
        loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
