"""A plain recurrence over long sequences with large initial weights: gradients explode."""

import argparse

import torch
from torch import nn

STEPS = 150


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    cell = nn.RNN(4, 24, nonlinearity="relu", batch_first=True)
    head = nn.Linear(24, 1)
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=2e-3)
    for step in range(steps):
        length = 20 if step < 50 else 120
        x = torch.randn(16, length, 4, generator=data)
        out, _ = cell(x)
        loss = (head(out[:, -1]) - x.sum((1, 2))[:, None] * 5).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
