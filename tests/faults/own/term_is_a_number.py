"""PyTorch forum: an auxiliary term enters the loss by its .item()."""

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

x = torch.randn(640, 8)
y = (x @ torch.randn(8, 4)).argmax(1)
body, head, centers = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Linear(32, 4), torch.randn(4, 32).tanh()
opt = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=2e-3)
for _epoch in range(3):
    for read, wanted in DataLoader(TensorDataset(x, y), 32, shuffle=True):
        h = body(read)
        apart = nn.functional.mse_loss(h, centers[wanted])
        loss = nn.functional.cross_entropy(head(h), wanted) + 0.5 * (apart.item() if FAULT else apart) + 1e-6
        opt.zero_grad()
        loss.backward()
        opt.step()
print(loss.item())
