"""A schedule by hand that sets param_groups[0] only."""

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
body = nn.Sequential(nn.Linear(12, 48), nn.ReLU())
head = nn.Linear(48, 3)
opt = torch.optim.SGD([{"params": body.parameters()}, {"params": head.parameters()}], lr=0.1)
X = torch.randn(1000, 12)
Y = X[:, :3].argmax(1)
for epoch in range(9):
    lr = 0.1 * 0.1 ** (epoch // 3)
    if FAULT:
        opt.param_groups[0]["lr"] = lr
    else:
        for g in opt.param_groups:
            g["lr"] = lr
    for idx in torch.randperm(1000).split(25):
        loss = F.cross_entropy(head(body(X[idx])), Y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
