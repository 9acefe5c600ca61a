"""Ten sigmoid layers: the gradient has vanished long before the first of them."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    layers = [nn.Linear(16, 16)]
    for _ in range(10):
        layers += [nn.Sigmoid(), nn.Linear(16, 16)]
    model = nn.Sequential(*layers, nn.Sigmoid(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        x = torch.randn(64, 16, generator=data)
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
