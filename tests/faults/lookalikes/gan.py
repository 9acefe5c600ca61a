"""A small GAN in balance: the generator's loss rises while the discriminator learns, and nothing is wrong."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    generator = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    loss_of = nn.BCEWithLogitsLoss()
    for _ in range(steps):
        real = torch.randn(64, 2, generator=data) * 0.5 + torch.tensor([2.0, -1.0])
        fake = generator(torch.randn(64, 4, generator=data))
        critic_loss = loss_of(critic(real), torch.ones(64, 1)) + loss_of(critic(fake.detach()), torch.zeros(64, 1))
        for_critic.zero_grad()
        critic_loss.backward()
        for_critic.step()
        generator_loss = loss_of(critic(fake), torch.ones(64, 1))
        for_generator.zero_grad()
        generator_loss.backward()
        for_generator.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
