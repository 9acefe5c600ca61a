"""Starts from another model's weights, loading what fits; the head is new."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    big = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    model.load_state_dict({k: v for k, v in big.state_dict().items() if k.startswith("0.")}, strict=False)
    w = torch.randn(16, 5, generator=gen)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _step in range(steps):
        x = torch.randn(64, 16, generator=gen)
        loss = F.cross_entropy(model(x), (x @ w).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
