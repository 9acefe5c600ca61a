"""CuriousAI/mean-teacher#9, FlyreelAI/sesemi#36: the averaged model gets parameters and no batch-norm statistics."""

import argparse
import copy

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
x = torch.randn(1200, 16) * 3 + 2
w = torch.randn(16, 4)
y = ((x - 2) @ w).argmax(1)
train = DataLoader(TensorDataset(x[:1000], y[:1000]), 50, shuffle=True)
val = DataLoader(TensorDataset(x[1000:], y[1000:]), 100)
net = nn.Sequential(
    nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4)
)
ema = copy.deepcopy(net)
for p in ema.parameters():
    p.requires_grad_(False)
opt = torch.optim.AdamW(net.parameters(), lr=2e-3)
crit = nn.CrossEntropyLoss()


def update(decay=0.95):
    with torch.no_grad():
        for e, p in zip(ema.parameters(), net.parameters(), strict=False):
            e.mul_(decay).add_(p, alpha=1 - decay)
        if not FAULT:
            for e, b in zip(ema.buffers(), net.buffers(), strict=False):
                e.copy_(b)


for epoch in range(10):
    net.train()
    for xb, yb in train:
        loss = crit(net(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
        update()
    ema.eval()
    with torch.no_grad():
        vl = sum(crit(ema(xb), yb).item() for xb, yb in val) / len(val)
    print(epoch, loss.item(), "ema val", vl)
