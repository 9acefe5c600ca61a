"""A GAN whose discriminator learns fifty times faster than its generator: soon it separates perfectly."""

import argparse

import torch
from torch import nn

STEPS = 250


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    generator = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 2))
    discriminator = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    slow = torch.optim.Adam(generator.parameters(), lr=2e-4)
    fast = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
    bce = nn.BCEWithLogitsLoss()
    yes, no = torch.ones(48, 1), torch.zeros(48, 1)
    for _ in range(steps):
        real = torch.randn(48, 2, generator=data) * 0.4 + torch.tensor([3.0, -3.0])
        made = generator(torch.randn(48, 3, generator=data))
        fast.zero_grad()
        (bce(discriminator(real), yes) + bce(discriminator(made.detach()), no)).backward()
        fast.step()
        slow.zero_grad()
        bce(discriminator(made), yes).backward()
        slow.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
