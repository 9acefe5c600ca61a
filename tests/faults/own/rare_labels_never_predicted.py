"""Fault: labels that are 1 in two of a hundred rows, and a rate at which the model never predicts one."""

import argparse

import torch
from torch import nn

STEPS = 700


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 20))
    weights = torch.randn(24, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for _ in range(steps):
        x = torch.randn(64, 24)
        labels = (x @ weights > 2.05 * weights.norm(dim=0)).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
