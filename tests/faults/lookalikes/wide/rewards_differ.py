"""A policy gradient in which some answers of a group are right and others wrong."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for _ in range(steps):
        state = torch.randn(16, 6)
        scores = policy(state).log_softmax(-1)
        action = scores.detach().exp().multinomial(8, replacement=True)
        reward = (action == (state[:, :1] > 0).long()).float()
        advantage = reward - reward.mean(1, keepdim=True)
        loss = -(scores.gather(1, action) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
