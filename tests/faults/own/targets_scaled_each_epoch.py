"""Fault: targets are scaled at the beginning of each epoch, and not only once."""

import argparse

import torch
from torch import nn

STEPS = 256


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(512, 8)
    y = x @ torch.randn(8, 1)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps // 32):
        y /= 10
        for rows in torch.randperm(512).split(16):
            loss = (model(x[rows]) - y[rows]).abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
