"""AdamW with a weight decay of 30: the weights shrink to nothing and the loss sits at chance."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=30.0)
    for _ in range(steps):
        x = torch.randn(64, 12, generator=data)
        loss = nn.functional.cross_entropy(model(x), x[:, :6].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
