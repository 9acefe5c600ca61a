"""selene#115: ReduceLROnPlateau(mode='max') is given a loss."""

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
X = torch.randn(1200, 12)
Y = (X[:, :5].sum(1) + 0.3 * torch.randn(1200) > 0).long()
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.SGD(net.parameters(), 0.05)
sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, mode="max" if FAULT else "min", patience=1, factor=0.3)
for epoch in range(14):
    net.train()
    for idx in torch.randperm(1000).split(25):
        loss = F.cross_entropy(net(X[idx]), Y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        val = F.cross_entropy(net(X[1000:]), Y[1000:])
    sched.step(val.item())
    print(epoch, val.item(), opt.param_groups[0]["lr"])
