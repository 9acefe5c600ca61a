"""Fault: of two optimizers only one makes steps."""

import argparse

import torch
from torch import nn

STEPS = 250


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    w = torch.randn(6, 20, generator=data)
    encoder, decoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU()), nn.Linear(64, 20)
    first, second = (torch.optim.Adam(part.parameters(), lr=1e-3) for part in (encoder, decoder))
    for _ in range(steps):
        x = torch.randn(32, 6, generator=data) @ w
        loss = nn.functional.mse_loss(decoder(encoder(x)), x)
        first.zero_grad()
        second.zero_grad()
        loss.backward()
        second.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
