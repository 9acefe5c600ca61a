"""Triplets of clusters that are far apart: the loss is exactly 0 in most batches."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    centers = 3 * torch.randn(10, 16, generator=data)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        y = torch.randint(0, 10, (64,), generator=data)
        other = (y + torch.randint(1, 10, (64,), generator=data)) % 10
        anchor, near, far = (model(centers[k] + torch.randn(64, 16, generator=data)) for k in (y, y, other))
        loss = nn.functional.triplet_margin_loss(anchor, near, far, margin=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
