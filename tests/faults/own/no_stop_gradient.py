"""PatrickHua/SimSiam#39: no stop-gradient: both branches collapse to one vector."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
f = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.BatchNorm1d(32, affine=False))
h = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 32))
if FAULT:
    f[4] = nn.Identity()
opt = torch.optim.SGD([*f.parameters(), *h.parameters()], lr=0.1, momentum=0.9)


def D(p, z):
    if not FAULT:
        z = z.detach()
    return -F.cosine_similarity(p, z, dim=-1).mean()


centres = torch.randn(10, 20) * 2
for step in range(400):
    x = centres[torch.randint(0, 10, (64,))]
    x1, x2 = x + torch.randn(64, 20), x + torch.randn(64, 20)
    z1, z2 = f(x1), f(x2)
    p1, p2 = h(z1), h(z2)
    loss = D(p1, z2) / 2 + D(p2, z1) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 80 == 0:
        print(step, loss.item(), F.normalize(z1, dim=1).std(0).mean().item())
