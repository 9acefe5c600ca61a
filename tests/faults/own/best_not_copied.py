"""Fault: the best weights are kept by reference, and training goes on in them."""

import argparse

import torch
from torch import nn

STEPS = 250


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    weights = torch.randn(20, generator=data)
    x, known = torch.randn(250, 20, generator=data), torch.randn(200, 20, generator=data)
    y, wanted = ((z @ weights + torch.randn(len(z), generator=data) > 0).long() for z in (x, known))
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    best, best_right = None, -1.0
    for step in range(steps):
        rows = torch.randint(0, 250, (32,), generator=data)
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 24:
            with torch.no_grad():
                right = (model(known).argmax(1) == wanted).float().mean().item()
            if right > best_right:
                best, best_right = model.state_dict(), right
    model.load_state_dict(best)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
