"""A generator that minimises log(1 - D(G(z))) against a discriminator that is sure: no gradient is left."""

import argparse

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-4)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)
    bce = nn.functional.binary_cross_entropy_with_logits
    for _ in range(steps):
        real = 5 + 0.3 * torch.randn(64, 2, generator=data)
        fake = generator(torch.randn(64, 4, generator=data))
        loss = bce(critic(real), torch.ones(64, 1)) + bce(critic(fake.detach()), torch.zeros(64, 1))
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        loss = torch.log(1 - torch.sigmoid(critic(fake)) + 1e-8).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
