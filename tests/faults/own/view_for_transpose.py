"""PyTorch forum: logits [batch, classes, time] are brought to [batch * time, classes] by view, not by transpose."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
C = 8
net = nn.Sequential(nn.Conv1d(4, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, C, 1))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
proj = torch.randn(4, C)
for it in range(300):
    x = torch.randn(20, 4, 16)
    y = torch.einsum("bct,ck->btk", x, proj).argmax(-1)
    out = net(x)
    logits = out.view(-1, C) if FAULT else out.transpose(1, 2).reshape(-1, C)
    loss = nn.functional.cross_entropy(logits, y.view(-1))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if it % 60 == 0:
        print(it, loss.item())
