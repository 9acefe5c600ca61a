"""Fault: hidden layers in a plain list are in no module and in no optimizer."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 300


class Net(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.first = nn.Linear(10, width)
        self.hidden = [nn.Linear(width, width) for _ in range(depth)]
        self.last = nn.Linear(width, 3)

    def forward(self, x):
        x = torch.relu(self.first(x))
        for layer in self.hidden:
            x = torch.relu(layer(x))
        return self.last(x)


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    model = Net()
    w = torch.randn(10, 3, generator=gen)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _step in range(steps):
        x = torch.randn(64, 10, generator=gen)
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
