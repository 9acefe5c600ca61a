"""The encoder runs under no_grad by mistake: half of the trainable tensors never get a gradient."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
    head = nn.Linear(16, 4)
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(steps):
        x = torch.randn(64, 12, generator=data)
        with torch.no_grad():
            code = encoder(x)
        loss = nn.functional.cross_entropy(head(code), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
