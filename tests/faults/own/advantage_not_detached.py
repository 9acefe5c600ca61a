"""astariul/encode-attend-navigate-pytorch#3: the critic's value is not detached in the policy loss, which trains the critic too."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
policy = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
value = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
opt = torch.optim.Adam([{"params": policy.parameters()}, {"params": value.parameters()}], lr=2e-3)
for it in range(300):
    obs = torch.randn(64, 6)
    dist = torch.distributions.Categorical(logits=policy(obs))
    act = dist.sample()
    rew = (act == obs[:, :3].argmax(1)).float() + 0.1 * torch.randn(64)
    v = value(obs).squeeze(1)
    adv = rew - (v if FAULT else v.detach())
    loss = -(dist.log_prob(act) * adv).mean() + 0.5 * (rew - v).pow(2).mean() - 0.01 * dist.entropy().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 60 == 0:
        print(it, rew.mean().item(), loss.item())
