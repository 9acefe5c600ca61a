"""Predictions (64, 1) against targets (64): the loss broadcasts to 64 x 64, the model learns the mean."""

import argparse
import warnings

import torch
from torch import nn

STEPS = 250


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    warnings.simplefilter("ignore")
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        x = torch.randn(64, 8, generator=data)
        loss = nn.functional.mse_loss(model(x), x.sum(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
