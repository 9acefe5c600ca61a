"""The iterator is made anew in each step, so that every batch is the first one."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 120


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(640, 8, generator=torch.Generator().manual_seed(seed))
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=32)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        batch, target = next(iter(loader))
        loss = nn.functional.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
