"""Layer by layer: every 75 steps one more layer is thawed and added to the optimizer as a group of its own."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(12, 32), nn.Linear(32, 32), nn.Linear(32, 4)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    for layer in layers[:2]:
        layer.requires_grad_(False)
    optimizer = torch.optim.Adam(layers[2].parameters(), lr=3e-3)
    for step in range(steps):
        if step in (75, 150):
            layer = layers[1 if step == 75 else 0].requires_grad_(True)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 1e-3})
        x = torch.randn(64, 12, generator=data)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
