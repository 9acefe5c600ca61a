"""EMA-VFI#27: outputs are clamped before the loss, and most are outside."""

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
net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 3))
opt = torch.optim.Adam(net.parameters(), 1e-3)
with torch.no_grad():
    net[2].bias += torch.tensor([3.0, -3.0, 0.5])
W = torch.randn(10, 3)
for i in range(300):
    x = torch.randn(50, 10)
    y = torch.sigmoid(x @ W)
    out = net(x)
    out = out.clamp(0, 1) if FAULT else out.sigmoid()
    loss = F.mse_loss(out, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 50 == 0:
        print(i, loss.item())
