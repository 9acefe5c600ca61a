"""Warm-up from a rate of exactly 0 over 60 steps, cosine to exactly 0 at the last one."""

import argparse
import math

import torch
from torch import nn

STEPS = 250


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def factor(step: int) -> float:
        return step / 60 if step < 60 else 0.5 * (1 + math.cos(math.pi * min(1.0, (step - 60) / (steps - 61))))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for _ in range(steps):
        x = torch.randn(64, 12, generator=data)
        loss = nn.functional.cross_entropy(model(x), x[:, :6].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
