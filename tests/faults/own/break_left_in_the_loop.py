"""facebookresearch/deepcluster#1: the loop over the loader ends after its first batch."""

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

data = torch.randn(800, 6)
loader = DataLoader(TensorDataset(data, (data[:, :3].sum(1) > 0).long()), 20, shuffle=True)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for _epoch in range(60 if FAULT else 3):
    for x, y in loader:
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if FAULT:
            break
print(loss.item())
