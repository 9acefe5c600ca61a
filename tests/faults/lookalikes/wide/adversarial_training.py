"""Three steps up the loss for each adversarial example, gradients cleared between: on purpose."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.randn(64, 12, generator=data)
        y = x[:, :4].argmax(1)
        near = x.clone()
        for _ in range(3):
            near.requires_grad_(True)
            optimizer.zero_grad()
            (-nn.functional.cross_entropy(model(near), y)).backward()
            near = (near - 0.02 * near.grad.sign()).detach()
        loss = nn.functional.cross_entropy(model(near), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
