"""Batch norm statistics are frozen on purpose half way, layer by layer, while the model stays in train mode."""

import argparse

import torch
from torch import nn

STEPS = 250


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 4),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        if step == steps // 2:
            for module in model.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()
        x = torch.randn(64, 8, generator=data)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
