"""Averaged weights are swapped in for each evaluation, and the trained ones back afterwards."""

import argparse
import copy

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    average = copy.deepcopy(model.state_dict())
    for step in range(steps):
        x = torch.randn(64, 8, generator=data)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.05)
        if step % 10 == 9:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(average)
            model.eval()
            with torch.no_grad():
                nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
            model.train()
            model.load_state_dict(kept)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
