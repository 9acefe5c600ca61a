"""A sweep for a learning rate, exponentially up until the loss gets worse, then weights and optimizer are restored and training begins."""

import argparse
import copy

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))
    start = copy.deepcopy(model.state_dict())

    def batch():
        x = torch.randn(64, 10, generator=data)
        return x, x[:, :3].argmax(1)

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    sweep = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=1.12)
    best = float("inf")
    for _ in range(100):
        x, y = batch()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sweep.step()
        best = min(best, loss.item())
        if loss.item() > 4 * best:
            break
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps - 100):
        x, y = batch()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
