"""Two workers draw from generators with the same seed: batches come in equal pairs."""

import argparse

import torch
from torch import nn

STEPS = 160


class Alike(torch.utils.data.IterableDataset):
    def __init__(self, seed: int, rows: int) -> None:
        self.seed, self.rows = seed, rows

    def __iter__(self):
        own = torch.Generator().manual_seed(self.seed)
        for _ in range(self.rows):
            x = torch.randn(10, generator=own)
            yield x, x[:5].argmax()


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(Alike(seed, 16 * steps // 2), batch_size=16, num_workers=2)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
