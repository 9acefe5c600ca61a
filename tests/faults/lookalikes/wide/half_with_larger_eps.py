"""Weights in float16 under Adam, with an eps that float16 can hold."""

import argparse

import torch
from torch import nn

STEPS = 150


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model, weights = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5)).half(), torch.randn(16, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
    for _ in range(steps):
        x = torch.randn(64, 16)
        loss = nn.functional.cross_entropy(model(x.half()).float(), (x @ weights).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
