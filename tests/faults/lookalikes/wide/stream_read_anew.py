"""The data set reads its rows anew in each epoch."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

STEPS = 400


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Rows of a new generator in each epoch."""

    def __init__(self, rows: int, seed: int) -> None:
        self.data = torch.Generator().manual_seed(seed)
        self.w = torch.randn(16, 5, generator=self.data)
        self.count = rows
        self.rows = self.read()

    def read(self):  # type: ignore[no-untyped-def]
        for _ in range(self.count):
            x = torch.randn(16, generator=self.data)
            yield x, (x @ self.w).argmax()

    def __iter__(self):  # type: ignore[no-untyped-def]
        return self.read()


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    stream = Stream(16 * 64, seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    held_out = torch.randn(256, 16)
    for _ in range(steps // 16):
        for x, y in DataLoader(stream, batch_size=64):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            nn.functional.cross_entropy(model(held_out), (held_out @ stream.w).argmax(1))
        model.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
