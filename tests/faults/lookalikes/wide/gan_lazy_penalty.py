"""A non-saturating GAN with a penalty on every sixteenth step only, times sixteen, and an averaged generator."""

import argparse
import copy

import torch
from torch import nn

STEPS = 500


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    g = nn.Sequential(nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 2))
    d = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    ema = copy.deepcopy(g).requires_grad_(False)
    og = torch.optim.Adam(g.parameters(), lr=2e-3, betas=(0.0, 0.99))
    od = torch.optim.Adam(d.parameters(), lr=2e-3, betas=(0.0, 0.99))

    def real(n):
        a = torch.rand(n) * 6.28
        return torch.stack([a.cos(), a.sin()], 1) + 0.05 * torch.randn(n, 2)

    for step in range(steps):
        g.requires_grad_(False), d.requires_grad_(True)
        loss_d = nn.functional.softplus(d(g(torch.randn(64, 8)))).mean() + nn.functional.softplus(-d(real(64))).mean()
        od.zero_grad()
        loss_d.backward()
        od.step()
        if step % 16 == 0:
            x = real(64).requires_grad_(True)
            (grad,) = torch.autograd.grad(d(x).sum(), x, create_graph=True)
            od.zero_grad()
            (16 * 0.05 * grad.square().sum(1).mean()).backward()
            od.step()
        g.requires_grad_(True), d.requires_grad_(False)
        loss_g = nn.functional.softplus(-d(g(torch.randn(64, 8)))).mean()
        og.zero_grad()
        loss_g.backward()
        og.step()
        with torch.no_grad():
            for p, q in zip(ema.parameters(), g.parameters(), strict=True):
                p.lerp_(q, 0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
