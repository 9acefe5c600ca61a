"""REINFORCE on a bandit: a loss around zero with changing sign that means nothing by itself."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    worth = torch.tensor([0.1, 0.4, 0.9, 0.3])
    policy = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    baseline = 0.0
    for _ in range(steps):
        logits = policy(torch.ones(16, 1))
        choice = torch.distributions.Categorical(logits=logits)
        action = choice.sample()
        reward = worth[action] + 0.3 * torch.randn(16, generator=data)
        loss = -(choice.log_prob(action) * (reward - baseline)).mean() - 0.01 * choice.entropy().mean()
        baseline = 0.95 * baseline + 0.05 * float(reward.mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
