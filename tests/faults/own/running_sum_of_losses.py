"""A running sum of losses keeps the graph of every step: little memory each, but for ever."""

import argparse

import torch
from torch import nn

STEPS = 450


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    w = torch.randn(16, 5, generator=data)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(nn.Linear(16, 32), *layers, nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    total = 0.0
    for _ in range(steps):
        x = torch.randn(64, 16, generator=data)
        loss = nn.functional.cross_entropy(model(x), (x @ w).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
