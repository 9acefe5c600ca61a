"""Adam with eps 0: a unit without gradient divides zero by zero."""

import argparse

import torch
from torch import nn

STEPS = 150


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))
    with torch.no_grad():
        model[0].bias[3] = -1000.0
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=0.0)
    for _ in range(steps):
        x = torch.randn(64, 10, generator=data)
        loss = nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
