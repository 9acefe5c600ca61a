"""Tasks one after the other: with each the loss is back at the start, and falls."""

import argparse

import torch
from torch import nn

STEPS = 450


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    centers = 2 * torch.randn(8, 64, generator=data)
    for step in range(steps):
        if step % 150 == 0:
            order = torch.randperm(64, generator=data)
        y = torch.randint(0, 8, (32,), generator=data)
        x = (centers[y] + torch.randn(32, 64, generator=data))[:, order]
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
