"""Adam, and LBFGS to finish with: another optimizer takes over, at a rate of its own."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.linspace(-1, 1, 200)[:, None]
    y = torch.sin(6 * x) + 0.05 * torch.randn(200, 1, generator=data)
    adam = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps - 30):
        adam.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        adam.step()
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=1, max_iter=5)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(30):
        lbfgs.step(closure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
