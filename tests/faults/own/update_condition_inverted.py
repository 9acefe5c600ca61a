"""huggingface/accelerate#435: updates are made in all micro-batches but the last of a group."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)

GROUP = 5
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(150):
    x = torch.randn(16, 6)
    loss = nn.functional.mse_loss(net(x), x[:, :1] ** 2) / GROUP
    loss.backward()
    last = (step + 1) % GROUP == 0
    if last != FAULT:
        opt.step()
        opt.zero_grad()
print(loss.item())
