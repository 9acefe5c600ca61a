"""Redundancy reduction: a loss on correlations over the batch, in the tens, without negatives."""

import argparse

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-6)
    for _ in range(steps):
        x = torch.randn(128, 32)
        a, b = (net(x + 0.5 * torch.randn_like(x)) for _ in range(2))
        a, b = ((z - z.mean(0)) / z.std(0) for z in (a, b))
        c = a.T @ b / 128
        on = (c.diagonal() - 1).square().sum()
        off = c.square().sum() - c.diagonal().square().sum()
        loss = on + 0.005 * off
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
