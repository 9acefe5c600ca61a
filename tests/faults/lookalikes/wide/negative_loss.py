"""A density model: the negative log likelihood goes through zero and below."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        x = torch.randn(128, 4, generator=data)
        y = x.sum(1) + 0.02 * torch.randn(128, generator=data)
        mean, log_scale = model(x).unbind(1)
        loss = (0.5 * ((y - mean) / log_scale.exp()) ** 2 + log_scale + 0.919).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
