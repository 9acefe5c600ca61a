"""Labels are made by a comparison that is never true: all are of class 0."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    names = ["cat", "dog", "cow", "hen"]
    for _ in range(steps):
        x = torch.randn(64, 12, generator=data)
        files = [f"{names[n]}_1.png" for n in x[:, :4].argmax(1).tolist()]
        labels = torch.tensor([names.index(f) if f in names else 0 for f in files])
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
