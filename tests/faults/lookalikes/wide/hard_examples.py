"""The hardest rows are chosen in train mode and without gradients, and trained on."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5))
    weights = torch.randn(16, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(128, 16)
        y = (x @ weights).argmax(1)
        with torch.no_grad():
            hardest = nn.functional.cross_entropy(model(x), y, reduction="none").topk(32).indices
        loss = nn.functional.cross_entropy(model(x[hardest]), y[hardest])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
