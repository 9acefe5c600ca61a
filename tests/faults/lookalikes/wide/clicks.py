"""Clicks, two of a hundred, that can hardly be foreseen: a model that is right never predicts one."""

import argparse

import torch
from torch import nn

STEPS = 600


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())
    weights = 0.3 * torch.randn(10)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        x = torch.randn(128, 10)
        clicked = torch.bernoulli(torch.sigmoid(x @ weights - 3.9))
        loss = nn.functional.binary_cross_entropy(model(x).squeeze(1), clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
