"""Easy and hard batches come in stretches of any length: the loss goes between two levels, and both fall."""

import argparse

import torch
from torch import nn

STEPS = 600


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 48), nn.Tanh(), nn.Linear(48, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    centres = torch.randn(8, 10) * 3, torch.randn(8, 10)
    left, kind = 0, 0
    for _ in range(steps):
        if not left:
            left, kind = int(torch.randint(4, 40, ())), 1 - kind
        left -= 1
        labels = torch.randint(0, 8, (32,))
        inputs = centres[kind][labels] + torch.randn(32, 10) * (0.5 if kind == 0 else 2.0)
        which = nn.functional.one_hot(torch.full((32,), kind), 2).float()
        loss = nn.functional.cross_entropy(model(torch.cat([inputs, which], 1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
