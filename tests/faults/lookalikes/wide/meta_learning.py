"""Reptile: an optimizer of its own for each task, whose few steps move the model a part of the way."""

import argparse

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    for _ in range(steps // 5):
        before = [p.detach().clone() for p in model.parameters()]
        size, shift = 1 + torch.rand(1, generator=data), 0.5 * torch.rand(1, generator=data)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        for _ in range(5):
            x = 6 * torch.rand(32, 1, generator=data) - 3
            loss = nn.functional.mse_loss(model(x), size * torch.sin(x + shift))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for parameter, start in zip(model.parameters(), before, strict=True):
                parameter.copy_(start + 0.3 * (parameter - start))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
