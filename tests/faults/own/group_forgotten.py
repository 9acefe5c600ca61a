"""Fault: a filter of parameter groups matches nothing; biases and gains are in no group."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 250


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed)
    w = torch.randn(16, 5, generator=gen)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 5))
    named = list(model.named_parameters())
    no_decay = ["bias", "LayerNorm.weight"]
    groups = [
        {"params": [p for n, p in named if not any(key in n for key in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n in no_decay], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=2e-3)
    for _step in range(steps):
        x = torch.randn(64, 16, generator=gen)
        y = (x @ w + 2 * torch.arange(5)).argmax(1)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
