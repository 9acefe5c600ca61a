"""Stage two on purpose: a new optimizer with a tenth of the rate for fine-tuning on other data."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 4))

    def train(optimizer, count, shift):
        for _ in range(count):
            x = torch.randn(64, 10, generator=data) + shift
            loss = nn.functional.cross_entropy(model(x), (x[:, :4] - shift).argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    train(torch.optim.Adam(model.parameters(), lr=1e-2), steps // 2, 0.0)
    train(torch.optim.Adam(model.parameters(), lr=1e-3), steps // 2, 0.3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
