"""Stack Overflow: the seed is set inside of the loop."""

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
net = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 2))
opt = torch.optim.Adam(net.parameters(), 1e-3)
for _i in range(300):
    if FAULT:
        torch.manual_seed(42)
    x0 = torch.randn(64, 2) * 0.3 + 1
    noise = torch.randn_like(x0)
    loss = F.mse_loss(net(0.6 * x0 + 0.8 * noise), noise)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
