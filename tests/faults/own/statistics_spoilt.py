"""Fault: a batch with a NaN is skipped after the forward pass; running statistics stay NaN for every evaluation."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 260


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    w = torch.randn(10, 4, generator=gen)
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    xv = torch.randn(128, 10, generator=gen)
    yv = (xv @ w).argmax(1)
    for step in range(steps):
        x = torch.randn(64, 10, generator=gen)
        y = (x @ w).argmax(1)
        if step == 90:
            x[3, 2] = float("nan")
        loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                F.cross_entropy(model(xv), yv)
            model.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
