"""Weights kept in bfloat16 and a small learning rate: nearly every update is smaller than the rounding step."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-5)
    for _ in range(steps):
        x = torch.randn(64, 16, generator=data)
        loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
