"""A policy with tiny initial weights and a loss around zero: its weights grow tenfold on purpose."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    policy = nn.Sequential(nn.Linear(4, 32, bias=False), nn.Tanh(), nn.Linear(32, 4, bias=False))
    for weight in policy.parameters():
        nn.init.normal_(weight, std=0.01)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(steps):
        state = torch.randn(64, 4, generator=data)
        chosen = torch.distributions.Categorical(logits=policy(state))
        action = chosen.sample()
        reward = (action == state.argmax(1)).float()
        loss = -((reward - reward.mean()) * chosen.log_prob(action)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
