"""Guitaricet/relora#18: both factors of an adapter begin with zeros."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)


class Adapted(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)
        if FAULT:
            nn.init.zeros_(self.a.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


net = nn.Sequential(Adapted(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 4))
opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=2e-3)
w = torch.randn(16, 4)
for _step in range(60):
    x = torch.randn(32, 16)
    loss = nn.functional.cross_entropy(net(x), (x @ w).argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
