"""Sharpness-aware minimisation: weights are moved up and put back around a second backward pass."""

import argparse

import torch
from torch import nn

STEPS = 160


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        x = torch.randn(64, 8, generator=data)
        y = x[:, :4].argmax(1)
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            size = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [0.05 * p.grad / size for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
