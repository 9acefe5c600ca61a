"""L-BFGS on the full batch: many passes over the same data in one step."""

import argparse

import torch
from torch import nn

STEPS = 40


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=10)
    x = torch.randn(256, 6, generator=data)
    y = x.sin().sum(1, keepdim=True)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
