"""Batches of four, half of all units dropped, noisy labels: the loss swings and falls slowly."""

import argparse

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5))
    head = nn.Linear(32, 2)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=2e-3)
    for _ in range(steps):
        x = torch.randn(4, 20, generator=data)
        target = ((x[:, :4].sum(1) + 0.8 * torch.randn(4, generator=data)) > 0).long()
        loss = nn.functional.cross_entropy(head(model(x)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
