"""Fault: the backbone is unfrozen half way and never given to the optimizer."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 300


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.head = nn.Linear(48, 5)

    def forward(self, x):
        return self.head(self.backbone(x))


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    model = Net()
    model.backbone.requires_grad_(False)
    w = torch.randn(12, 5, generator=gen)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for step in range(steps):
        if step == steps // 2:
            model.backbone.requires_grad_(True)
        x = torch.randn(64, 12, generator=gen)
        y = (torch.sin(2 * x) @ w).argmax(1)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
