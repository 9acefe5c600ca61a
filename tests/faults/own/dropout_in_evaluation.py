"""Evaluations run under no_grad but in train mode: dropout and batch statistics are on."""

import argparse

import torch
from torch import nn

STEPS = 240


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2048, 10, generator=data)
    y = x[:, :5].argmax(1)
    train = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[:1920], y[:1920]), batch_size=64, shuffle=True)
    held_out = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[1920:], y[1920:]), batch_size=64)
    for _ in range(steps // 30):
        for some, wanted in train:
            loss = nn.functional.cross_entropy(model(some), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for some, wanted in held_out:
                nn.functional.cross_entropy(model(some), wanted)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
