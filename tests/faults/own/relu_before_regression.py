"""Stack Overflow: a ReLU after the last layer, although half of the (standardised) targets are negative."""

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
x = torch.randn(2000, 7)
y = x @ torch.randn(7, 1) + 0.5 * torch.sin(3 * x[:, :1])
y = (y - y.mean()) / y.std()
layers = [nn.Linear(7, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)]
if FAULT:
    layers.append(nn.ReLU())
model = nn.Sequential(*layers)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_fn = nn.MSELoss()
for epoch in range(8):
    for xb, yb in DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True):
        pred = model(xb)
        loss = loss_fn(pred, yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
