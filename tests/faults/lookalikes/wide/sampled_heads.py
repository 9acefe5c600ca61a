"""Four tasks with a head each, one task drawn per step: heads take turns."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 320


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    body = nn.Sequential(nn.Linear(16, 64), nn.ReLU())
    heads = nn.ModuleList(nn.Linear(64, 4) for _ in range(4))
    w = torch.randn(4, 16, 4, generator=gen)
    optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()], lr=3e-3)
    for _step in range(steps):
        task = int(torch.randint(0, 4, (1,), generator=gen))
        x = torch.randn(64, 16, generator=gen)
        loss = F.cross_entropy(heads[task](body(x)), (x @ w[task]).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
