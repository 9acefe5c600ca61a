"""Full-batch training with a validation pass every ten steps and model.train() after it, as it should be."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 10, generator=data)
    y = (x[:, :1] * 2 + x[:, 1:2] ** 2) + 0.1 * torch.randn(256, 1, generator=data)
    model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        model.train()
        loss = nn.functional.mse_loss(model(x[:200]), y[:200])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                nn.functional.mse_loss(model(x[200:]), y[200:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
