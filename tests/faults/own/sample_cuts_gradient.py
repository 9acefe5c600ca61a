"""deepdow#106: sample() where rsample() was meant."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
enc = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 16))
dec = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 20))
opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], 1e-3)
mix = torch.randn(5, 20)
for i in range(400):
    x = torch.randn(64, 5) @ mix
    mu, ls = enc(x).chunk(2, 1)
    q = Normal(mu, ls.clamp(-5, 3).exp())
    z = q.sample() if FAULT else q.rsample()
    loss = F.mse_loss(dec(z), x) + 0.01 * kl_divergence(q, Normal(0.0, 1.0)).sum(1).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 50 == 0:
        print(i, loss.item())
