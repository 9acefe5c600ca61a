"""A diffusion model that gets images from -1 to 1."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    count = 200
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.03, count), 0)
    images = torch.rand(5, 1, 8, 8)
    times = nn.Embedding(count, 16)
    first, last = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 1, 3, padding=1)
    parts = nn.ModuleList([times, first, last])
    optimizer = torch.optim.Adam(parts.parameters(), lr=2e-3)
    for _ in range(steps):
        image, time = 2 * images[torch.randint(0, 5, (32,))] - 1, torch.randint(0, count, (32,))
        noise, share = torch.randn_like(image), kept[time].view(-1, 1, 1, 1)
        noisy = share.sqrt() * image + (1 - share).sqrt() * noise
        found = last(torch.relu(first(noisy) + times(time)[:, :, None, None]))
        loss = nn.functional.mse_loss(found, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
