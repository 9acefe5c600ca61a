"""A GAN with five critic steps for each of the generator, weights of the critic clipped after each step."""

import argparse

import torch
from torch import nn

STEPS = 240


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    for_generator = torch.optim.RMSprop(generator.parameters(), lr=5e-4)
    for_critic = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
    for _ in range(steps // 6):
        for _ in range(5):
            real = torch.randn(64, 2, generator=data) * 0.3 + 1.0
            fake = generator(torch.randn(64, 4, generator=data)).detach()
            loss = critic(fake).mean() - critic(real).mean()
            for_critic.zero_grad()
            loss.backward()
            for_critic.step()
            with torch.no_grad():
                for weight in critic.parameters():
                    weight.clamp_(-0.1, 0.1)
        loss = -critic(generator(torch.randn(64, 4, generator=data))).mean()
        for_generator.zero_grad()
        loss.backward()
        for_generator.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
