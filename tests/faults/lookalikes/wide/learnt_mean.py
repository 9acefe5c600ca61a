"""A density with a learnt mean, in batches of as many rows as columns: a row against a table is meant."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    mean = nn.Parameter(torch.zeros(32))
    optimizer = torch.optim.Adam([mean], lr=1e-2)
    for _ in range(steps):
        x = torch.randn(32, 32) + torch.arange(32.0) / 8
        loss = (x - mean).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
