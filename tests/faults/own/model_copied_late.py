"""Fault: the model is copied after its optimizer was built, and the copy is trained."""

import argparse
import copy

import torch
from torch import nn

STEPS = 120


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, weights = copy.deepcopy(model), torch.randn(20, 1)
    for _ in range(steps):
        x = torch.randn(64, 20)
        loss = nn.functional.mse_loss(model(x), x @ weights)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
