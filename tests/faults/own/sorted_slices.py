"""The rows are sorted by class and sliced in order, without a DataLoader: each batch holds one class."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
x = torch.cat([torch.randn(200, 14) + 0.7 * torch.randn(14) for _ in range(5)])
y = torch.arange(5).repeat_interleave(200)
net = nn.Sequential(nn.Linear(14, 50), nn.ReLU(), nn.Linear(50, 5))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for epoch in range(12):
    order = torch.arange(1000) if FAULT else torch.randperm(1000)
    for b in range(0, 1000, 40):
        idx = order[b : b + 40]
        loss = nn.functional.cross_entropy(net(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
