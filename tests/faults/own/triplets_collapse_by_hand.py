"""Fault: triplets with distances by hand, mined so hard that all vectors become one."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16))
    centres = 0.4 * torch.randn(10, 20)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    classes = torch.arange(10).repeat_interleave(4)
    same = classes[:, None] == classes[None]
    for _ in range(steps):
        vectors = model(centres[classes] + 0.8 * torch.randn(40, 20))
        squares = vectors.square().sum(1)
        distance = (squares[:, None] + squares[None] - 2 * vectors @ vectors.T).clamp(min=1e-9).sqrt()
        furthest = distance.masked_fill(~same, -1).amax(1)
        nearest = distance.masked_fill(same, 1e9).amin(1)
        loss = torch.relu(furthest - nearest + 0.5).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
