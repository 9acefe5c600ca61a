"""Windows of four micro-batches, and a shorter one at the end of each epoch."""

import argparse

import torch
from torch import nn

STEPS = 120


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    truth = torch.randn(16, 5, generator=data)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps // 5):
        for micro in range(18):
            x = torch.randn(16, 16, generator=data)
            loss = nn.functional.cross_entropy(model(x), (x @ truth).argmax(1)) / 4
            loss.backward()
            if micro % 4 == 3 or micro == 17:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
