"""Each batch opens its file and nobody closes it."""

import argparse
import tempfile

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    opened = []
    for _ in range(steps):
        opened.append(tempfile.TemporaryFile())  # noqa: SIM115
        x = torch.randn(64, 10, generator=data)
        loss = nn.functional.cross_entropy(model(x), x[:, :5].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
