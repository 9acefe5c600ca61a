"""Fault: the micro-batches that are left over at the end of an epoch go into the first update of the next."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 72


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    x, weights = torch.randn(200, 16), torch.randn(16, 5)
    loader = DataLoader(TensorDataset(x, (x @ weights).argmax(1)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps // 6):
        for number, (inputs, labels) in enumerate(loader):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            if number % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
