"""Momentum contrast: the right answer is always the first, so that all labels are 0."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    queue = nn.functional.normalize(torch.randn(128, 16, generator=data), dim=1)
    for _ in range(steps):
        x = torch.randn(64, 24, generator=data)
        query = nn.functional.normalize(encoder(x + 0.2 * torch.randn(64, 24, generator=data)), dim=1)
        with torch.no_grad():
            key = nn.functional.normalize(encoder(x + 0.2 * torch.randn(64, 24, generator=data)), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ queue.T], dim=1) / 0.2
        loss = nn.functional.cross_entropy(logits, torch.zeros(64, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue = torch.cat([key, queue])[:128]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
