"""The scheduler is made in the loop over epochs: its warm-up begins anew each time."""

import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    w = torch.randn(16, 5, generator=data)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for _ in range(steps // 50):
        schedule = LambdaLR(optimizer, lambda i: min((i + 1) / 30, 1.0))
        for _ in range(50):
            x = torch.randn(64, 16, generator=data)
            loss = nn.functional.cross_entropy(model(x), (x @ w).argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
