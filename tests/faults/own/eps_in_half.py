"""Fault: the eps of RMSprop is zero in float16, in which the weights are."""

import argparse

import torch
from torch import nn

STEPS = 60


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model, weights = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5)).half(), torch.randn(16, 5)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
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
