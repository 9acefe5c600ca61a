"""First-order meta-learning: each task trains a copy of the model, which is new in each step."""

import argparse
import copy

import torch
from torch import nn

STEPS = 100


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        height = 3 * torch.rand(1)
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), lr=1e-2)
        for _ in range(2):
            x = 6 * torch.rand(16, 1) - 3
            loss = nn.functional.mse_loss(fast(x), height * x.sin())
            inner.zero_grad()
            loss.backward()
            inner.step()
        x = 6 * torch.rand(16, 1) - 3
        loss = nn.functional.mse_loss(fast(x), height * x.sin())
        fast.zero_grad()
        loss.backward()
        optimizer.zero_grad()
        for slow, quick in zip(model.parameters(), fast.parameters(), strict=True):
            slow.grad = quick.grad.clone()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
