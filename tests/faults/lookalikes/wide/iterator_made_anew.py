"""The iterator is made anew when it is empty."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(6400, 16)
    data = TensorDataset(x, (x @ torch.randn(16, 5)).argmax(1))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(data, batch_size=64, shuffle=True)
    batches = iter(loader)
    for _ in range(steps):
        try:
            x, y = next(batches)
        except StopIteration:
            batches = iter(loader)
            x, y = next(batches)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
