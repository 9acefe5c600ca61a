"""An average over a hundred updates is evaluated in a run of three hundred."""

import argparse
import copy

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model, weights = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5)), torch.randn(16, 5)
    average = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    known = torch.randn(200, 16)
    for step in range(steps):
        x = torch.randn(64, 16)
        loss = nn.functional.cross_entropy(model(x), (x @ weights).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 1 - 0.99)
            if step % 50 == 49:
                average.eval()
                print(step, nn.functional.cross_entropy(average(known), (known @ weights).argmax(1)).item())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
