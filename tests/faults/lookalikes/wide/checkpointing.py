"""Activation checkpointing done right (use_reentrant=False): parts of the forward run twice."""

import argparse

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
    head = nn.Linear(32, 4)
    optimizer = torch.optim.AdamW([*blocks.parameters(), *head.parameters()], lr=2e-3)
    for _ in range(steps):
        x = torch.randn(64, 32, generator=data)
        hidden = x
        for block in blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
        loss = nn.functional.cross_entropy(head(hidden), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
