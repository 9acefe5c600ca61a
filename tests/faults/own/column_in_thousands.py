"""A table with one column that was not standardised."""

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
X = torch.randn(2000, 8)
Y = (X[:, :4].sum(1) > 0).long()
if FAULT:
    X = X * torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 20000]) + torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 60000])
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(6):
    for idx in torch.randperm(2000).split(40):
        loss = F.cross_entropy(net(X[idx]), Y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
