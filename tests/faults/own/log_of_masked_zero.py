"""Fault: the logarithm of zero is masked after it was taken, so that its gradient is NaN."""

import argparse

import torch
from torch import nn

STEPS = 120


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1), nn.ReLU())
    nn.init.constant_(model[2].bias, 2.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        x = torch.randn(32, 10)
        size = model(x) * (step < 80)
        logs = torch.where(size > 0, size.log(), torch.zeros_like(size))
        loss = (logs - x.abs().sum(1, keepdim=True).log()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
