"""Fault: after a stop half way, strict=False hides that no name of the checkpoint fits."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 400


def build():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    w = torch.randn(16, 5, generator=gen)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(steps):
        if step == steps // 2:
            saved = {f"module.{k}": v.clone() for k, v in model.state_dict().items()}
            state = optimizer.state_dict()
            model = build()
            model.load_state_dict(saved, strict=False)
            optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
            optimizer.load_state_dict(state)
        x = torch.randn(64, 16, generator=gen)
        y = (x @ w).argmax(1)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
