"""Outputs of every batch are kept on the host for a metric that is never computed."""

import argparse

import torch
from torch import nn

STEPS = 250


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 512))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    outputs = []
    for _ in range(steps):
        x = torch.randn(256, 64, generator=data)
        predicted = model(x)
        outputs.append(predicted.detach())
        loss = nn.functional.cross_entropy(predicted, x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
