"""A contrastive loss that starts at ln of the batch size and takes its time."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(64, 32, generator=data)
        views = [nn.functional.normalize(model(x + 0.3 * torch.randn(64, 32, generator=data)), dim=1) for _ in range(2)]
        loss = nn.functional.cross_entropy(views[0] @ views[1].T / 0.2, torch.arange(64))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
