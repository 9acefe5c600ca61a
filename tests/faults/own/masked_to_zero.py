"""From step 60 on every label is masked and the sum is divided by at least one: the loss is 0."""

import argparse

import torch
from torch import nn

STEPS = 160


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        x = torch.randn(64, 10, generator=data)
        y = x[:, :5].argmax(1)
        if step >= 60:
            y = torch.full_like(y, -100)
        total = nn.functional.cross_entropy(model(x), y, ignore_index=-100, reduction="sum")
        loss = total / (y != -100).sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
