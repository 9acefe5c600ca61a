"""An actor and a critic in one optimizer: the loss grows while the policy finds more rewards."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    body = nn.Sequential(nn.Linear(6, 64), nn.Tanh())
    policy, value = nn.Linear(64, 4), nn.Linear(64, 1)
    parameters = [*body.parameters(), *policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)
    worth = 5 * torch.randn(6, 4, generator=data)
    for _ in range(steps):
        state = torch.randn(64, 6, generator=data)
        hidden = body(state)
        chance = torch.distributions.Categorical(logits=policy(hidden))
        action = chance.sample()
        reward = (state @ worth).gather(1, action[:, None]).squeeze(1).clamp(min=0)
        expected = value(hidden).squeeze(1)
        advantage = (reward - expected).detach()
        loss = -(chance.log_prob(action) * advantage).mean() + 0.5 * (reward - expected).pow(2).mean()
        loss = loss - 0.01 * chance.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
