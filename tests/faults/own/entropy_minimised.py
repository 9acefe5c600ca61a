"""open_spiel#962: the entropy bonus of a policy gradient has the wrong sign."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)

policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5))
opt = torch.optim.Adam(policy.parameters(), lr=2e-3)
means = torch.randn(6, 5)
for _step in range(120):
    s = torch.randn(64, 6)
    d = torch.distributions.Categorical(logits=policy(s))
    a = d.sample()
    reward = (s @ means).gather(1, a[:, None])[:, 0]
    bonus = 0.02 * d.entropy().mean()
    loss = -(d.log_prob(a) * (reward - reward.mean())).mean() + (bonus if FAULT else -bonus)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
