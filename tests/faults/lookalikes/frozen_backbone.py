"""Fine-tunes a head on a backbone that is frozen on purpose, its dropout and batch norm in eval mode."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    backbone = nn.Sequential(nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2)).requires_grad_(False)
    backbone.eval()
    head = nn.Linear(48, 3)
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    loss_of = nn.CrossEntropyLoss()
    for _ in range(steps):
        x = torch.randn(48, 12, generator=data)
        target = x[:, :3].argmax(1)
        with torch.no_grad():
            features = backbone(x)
        loss = loss_of(head(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
