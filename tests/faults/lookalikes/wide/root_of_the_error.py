"""The loss is the root of the mean squared error, which has no derivative at zero and never gets there."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model, weights = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)), torch.randn(10, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(64, 10)
        loss = nn.functional.mse_loss(model(x), x @ weights).sqrt()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
