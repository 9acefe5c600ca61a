"""Evaluates for long and waits for storage every sixty steps."""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    w = torch.randn(16, 5, generator=gen)
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        x = torch.randn(64, 16, generator=gen)
        loss = F.cross_entropy(model(x), (x @ w).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 60 == 59:
            model.eval()
            with torch.no_grad():
                for _ in range(40):
                    x = torch.randn(256, 16, generator=gen)
                    F.cross_entropy(model(x), (x @ w).argmax(1))
            time.sleep(0.6)
            model.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
