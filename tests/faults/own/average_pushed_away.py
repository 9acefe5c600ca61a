"""ai-toolkit#1034: the averaged weights are pushed away from the model."""

import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
X = torch.randn(1200, 10)
Y = (X[:, :3].sum(1) > 0).long()
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
ema = copy.deepcopy(net).requires_grad_(False)
opt = torch.optim.Adam(net.parameters(), 2e-3)
for epoch in range(8):
    for idx in torch.randperm(1000).split(25):
        loss = F.cross_entropy(net(X[idx]), Y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for e, p in zip(ema.parameters(), net.parameters(), strict=False):
                gap = e - p
                e.add_(gap * 0.01) if FAULT else e.sub_(gap * 0.01)
    ema.eval()
    with torch.no_grad():
        print(epoch, loss.item(), F.cross_entropy(ema(X[1000:]), Y[1000:]).item())
