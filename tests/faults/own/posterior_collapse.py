"""A VAE whose reconstruction error is averaged over pixels and whose KL term is summed: the code falls silent."""

import argparse

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    encoder = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    decoder = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 32))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=2e-3)
    mix = torch.randn(4, 32, generator=data)
    for _ in range(steps):
        x = 0.5 * torch.randn(64, 4, generator=data) @ mix
        mean, log_variance = encoder(x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        error = nn.functional.mse_loss(decoder(code), x)
        kl = 0.5 * torch.sum(mean.pow(2) + log_variance.exp() - 1 - log_variance, dim=1).mean()
        optimizer.zero_grad()
        (error + 4 * kl).backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
