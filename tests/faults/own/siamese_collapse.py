"""Two views are pulled together and nothing is pushed apart: all vectors become one."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.2, momentum=0.9)
    for _ in range(steps):
        x = torch.randn(64, 24, generator=data)
        one, other = (encoder(x + 0.5 * torch.randn(64, 24, generator=data)) for _ in range(2))
        loss = 1 - nn.functional.cosine_similarity(one, other).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
