"""Stack Overflow: weights are initialised at the beginning of each epoch."""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
x = torch.randn(1000, 15)
y = (x @ torch.randn(15, 4)).argmax(1)
loader = DataLoader(TensorDataset(x, y), 25, shuffle=True)


def init(m):
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        nn.init.zeros_(m.bias)


net = nn.Sequential(nn.Linear(15, 64), nn.ReLU(), nn.Linear(64, 4))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
net.apply(init)
for epoch in range(8):
    if FAULT:
        net.apply(init)
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(net(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
