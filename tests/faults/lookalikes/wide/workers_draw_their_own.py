"""A generator of the data set's own, which each worker seeds for itself."""

import argparse

import numpy as np
import torch
from torch import nn

STEPS = 96


class Noisy(torch.utils.data.Dataset):
    """Points with noise that is drawn anew each time."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.x = self.rng.normal(size=(1024, 20)).astype("float32")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        x = self.x[i]
        return x + self.rng.normal(0.0, 0.3, 20).astype("float32"), x[:4].argmax()


def seed_worker(_: int) -> None:
    torch.utils.data.get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    loader = torch.utils.data.DataLoader(
        Noisy(seed), batch_size=32, shuffle=True, num_workers=2, worker_init_fn=seed_worker
    )
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps // len(loader)):
        for some, wanted in loader:
            loss = nn.functional.cross_entropy(model(some), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
