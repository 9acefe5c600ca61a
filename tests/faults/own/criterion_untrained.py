"""Metric learning: the loss (ArcFace) has class weights of its own, which are in no optimizer."""

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


class ArcFace(nn.Module):
    def __init__(self, d, n, s=16.0, m=0.2):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, d))
        self.s, self.m = s, m

    def forward(self, e, y):
        cos = F.linear(F.normalize(e), F.normalize(self.weight)).clamp(-0.999, 0.999)
        with_margin = torch.cos(torch.acos(cos) + self.m)
        hot = F.one_hot(y, cos.shape[1]).bool()
        return F.cross_entropy(self.s * torch.where(hot, with_margin, cos), y)


backbone = nn.Sequential(nn.Linear(16, 64), nn.PReLU(), nn.Linear(64, 12))
criterion = ArcFace(12, 8)
optimizer = torch.optim.SGD(backbone.parameters(), lr=0.05, momentum=0.9)
if not FAULT:
    optimizer.add_param_group({"params": criterion.parameters()})
centres = torch.randn(8, 16)
for it in range(250):
    y = torch.randint(0, 8, (32,))
    x = centres[y] + 0.5 * torch.randn(32, 16)
    loss = criterion(backbone(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if it % 50 == 0:
        print(it, loss.item())
