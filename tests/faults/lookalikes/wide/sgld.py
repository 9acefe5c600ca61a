"""Langevin noise after each update: the loss wanders around its level for ever."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for _ in range(steps):
        x = torch.randn(64, 8, generator=data)
        loss = nn.functional.mse_loss(model(x), x[:, :2].sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.01 * torch.randn(weight.shape, generator=data))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
