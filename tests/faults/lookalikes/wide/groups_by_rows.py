"""Micro-batches are accumulated until there are enough rows: mostly four of them, and five again and again."""

import argparse

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model, weights = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5)), torch.randn(16, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = 0
    for step in range(steps):
        x = torch.randn(7 if step % 25 < 20 else 6, 16)
        loss = nn.functional.cross_entropy(model(x), (x @ weights).argmax(1), reduction="sum") / 32
        loss.backward()
        rows += len(x)
        if rows >= 28:
            optimizer.step()
            optimizer.zero_grad()
            rows = 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
