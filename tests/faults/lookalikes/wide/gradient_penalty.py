"""A penalty on input gradients: a second backward pass inside the loss."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Softplus(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        x = torch.randn(64, 8, generator=data, requires_grad=True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = nn.functional.mse_loss(out, x.detach().sin().sum(1, keepdim=True)) + 0.01 * slope.square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
