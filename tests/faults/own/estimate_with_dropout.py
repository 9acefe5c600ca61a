"""Fault: the loss is estimated under no_grad, and dropout stays active."""

import argparse

import torch
from torch import nn

STEPS = 250


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 5))
    weights = torch.randn(16, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    known = torch.randn(200, 16)
    for step in range(steps):
        x = torch.randn(32, 16)
        loss = nn.functional.cross_entropy(model(x), (x @ weights).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 39:
            with torch.no_grad():
                print(nn.functional.cross_entropy(model(known), (known @ weights).argmax(1)).item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
