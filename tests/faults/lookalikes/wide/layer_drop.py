"""A residual network that skips whole blocks at random while it trains."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 300


class Net(nn.Module):
    def __init__(self, depth=6, dim=32):
        super().__init__()
        self.inp = nn.Linear(10, dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)) for _ in range(depth)
        )
        self.out = nn.Linear(dim, 3)

    def forward(self, x, gen):
        x = self.inp(x)
        for block in self.blocks:
            if not self.training or torch.rand(1, generator=gen) > 0.4:
                x = x + block(x)
        return self.out(x)


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    model = Net()
    w = torch.randn(10, 3, generator=gen)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _step in range(steps):
        x = torch.randn(64, 10, generator=gen)
        loss = F.cross_entropy(model(x, gen), (x @ w).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
