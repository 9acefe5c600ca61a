"""Accumulation of four micro-batches, cleared right after each update, with a short last group in each epoch."""

import argparse

import torch
from torch import nn

STEPS = 240


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        parts = 4 if step % 10 != 9 else 2
        for _ in range(parts):
            x = torch.randn(16, 8, generator=data)
            (nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)) / parts).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
