"""Weights of the rare class turned upside down: positives / negatives."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
X = torch.randn(3000, 10)
Y = ((X[:, 0] + X[:, 1] + 0.3 * torch.randn(3000)) > 2.0).float()
pos, neg = Y.sum(), (1 - Y).sum()
crit = nn.BCEWithLogitsLoss(pos_weight=pos / neg if FAULT else neg / pos)
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
opt = torch.optim.Adam(net.parameters(), 1e-3)
for epoch in range(6):
    for idx in torch.randperm(3000).split(50):
        loss = crit(net(X[idx]).squeeze(1), Y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
