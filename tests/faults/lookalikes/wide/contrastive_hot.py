"""Contrastive pairs at a temperature of 1: the loss can only fall a little below ln of the batch size."""

import argparse

import torch
from torch import nn

STEPS = 500


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    n = 128
    for _ in range(steps):
        x = torch.randn(n, 32, generator=data)
        views = torch.cat([x + 0.5 * torch.randn(n, 32, generator=data) for _ in range(2)])
        z = nn.functional.normalize(model(views), dim=1)
        logits = (z @ z.T / 1.0).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
        labels = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
        loss = nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
