"""Experts behind a router without balance: some are hardly ever chosen."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    gate, experts = nn.Linear(12, 6), nn.ModuleList(nn.Linear(12, 4) for _ in range(6))
    model = nn.ModuleDict({"gate": gate, "experts": experts})
    truth = torch.randn(12, 4, generator=data)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        x = torch.randn(8, 12, generator=data)
        share = gate(x).softmax(1)
        top = share.argmax(1)
        out = torch.zeros(8, 4)
        for k in top.unique().tolist():
            rows = top == k
            out[rows] = share[rows, k, None] * experts[k](x[rows])
        loss = nn.functional.cross_entropy(out, (x @ truth).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
