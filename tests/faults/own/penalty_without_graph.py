"""A gradient penalty without create_graph=True."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
G = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
og = torch.optim.Adam(G.parameters(), 1e-4, betas=(0.0, 0.9))
od = torch.optim.Adam(D.parameters(), 1e-4, betas=(0.0, 0.9))
for i in range(300):
    real = torch.randn(48, 2) * 0.5 + 1
    fake = G(torch.randn(48, 4))
    a = torch.rand(48, 1)
    mid = (a * real + (1 - a) * fake.detach()).requires_grad_()
    (g,) = torch.autograd.grad(D(mid).sum(), mid, create_graph=not FAULT)
    d_loss = D(fake.detach()).mean() - D(real).mean() + 10 * (g.norm(dim=1) - 1).pow(2).mean()
    od.zero_grad()
    d_loss.backward()
    od.step()
    if i % 5 == 0:
        g_loss = -D(G(torch.randn(48, 4))).mean()
        og.zero_grad()
        g_loss.backward()
        og.step()
print(d_loss.item())
