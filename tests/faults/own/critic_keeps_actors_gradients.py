"""Fault: the actor's loss leaves gradients in the critic, whose optimizer applies them with its own."""

import argparse

import torch
from torch import nn

STEPS = 150


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    actor = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 2), nn.Tanh())
    critic = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    for_actor = torch.optim.Adam(actor.parameters(), lr=1e-3)
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    for _ in range(steps):
        state, action = torch.randn(64, 6), 2 * torch.rand(64, 2) - 1
        reward = -(action - state[:, :2]).square().sum(1, keepdim=True)
        for_actor.zero_grad()
        (-critic(torch.cat([state, actor(state)], 1)).mean()).backward()
        for_actor.step()
        nn.functional.mse_loss(critic(torch.cat([state, action], 1)), reward).backward()
        for_critic.step()
        for_critic.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
