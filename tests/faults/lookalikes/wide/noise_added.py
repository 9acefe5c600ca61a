"""Augmentation that begins in the middle of the run: the loss jumps and stays higher."""

import argparse

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    centers = torch.randn(8, 32, generator=data)
    for step in range(steps):
        y = torch.randint(0, 8, (64,), generator=data)
        x = centers[y] + 0.6 * torch.randn(64, 32, generator=data)
        if step >= steps // 2:
            x = x * (torch.rand(64, 32, generator=data) > 0.3) + 0.8 * torch.randn(64, 32, generator=data)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
