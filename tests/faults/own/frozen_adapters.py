"""Adapters whose output is detached by mistake: they are trainable, in the optimizer, and get no gradient."""

import argparse

import torch
from torch import nn

STEPS = 150


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    base = nn.Linear(12, 24).requires_grad_(False)
    down, up = nn.Linear(12, 4), nn.Linear(4, 24)
    head = nn.Linear(24, 3)
    optimizer = torch.optim.Adam([*down.parameters(), *up.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(steps):
        x = torch.randn(32, 12, generator=data)
        hidden = base(x) + up(down(x)).detach()
        loss = nn.functional.cross_entropy(head(hidden.relu()), x[:, :3].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
