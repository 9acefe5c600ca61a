"""A VAE with KL warm-up: the loss rises as the weight of the KL term goes up."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 8))
    decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 20))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=2e-3)
    mix = torch.randn(4, 20, generator=data)
    for step in range(steps):
        x = torch.randn(64, 4, generator=data) @ mix + 0.1 * torch.randn(64, 20, generator=data)
        mean, log_variance = encoder(x).chunk(2, 1)
        z = mean + (0.5 * log_variance).exp() * torch.randn(64, 4, generator=data)
        kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        loss = nn.functional.mse_loss(decoder(z), x, reduction="none").sum(1).mean() + min(1.0, step / 200) * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
