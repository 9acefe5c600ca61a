"""Label smoothing: the loss rests on its floor, far above zero, from early on."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        y = torch.randint(0, 10, (64,), generator=data)
        x = nn.functional.one_hot(y, 10).float() + 0.1 * torch.randn(64, 10, generator=data)
        loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
