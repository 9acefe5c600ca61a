"""A bottleneck of four units behind a ReLU dies in the middle of the run."""

import argparse

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    w = torch.randn(16, 5, generator=data)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 5)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        x = torch.randn(64, 16, generator=data)
        loss = nn.functional.cross_entropy(model(x), (x @ w).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 150:
            with torch.no_grad():
                model[2].bias.sub_(50.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
