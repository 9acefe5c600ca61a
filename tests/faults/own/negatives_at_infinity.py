"""jinnnju/PaAno#1: the masked diagonal is taken for the hardest negative, at infinite distance: the loss is 0 from the start."""

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

encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24))
opt = torch.optim.AdamW(encoder.parameters(), lr=1e-3)
for _step in range(120):
    x = torch.randn(32, 16)
    a = F.normalize(encoder(x + 0.2 * torch.randn_like(x)), dim=1)
    p = F.normalize(encoder(x + 0.2 * torch.randn_like(x)), dim=1)
    similar = a @ p.t()
    others = similar.clone()
    others.diagonal().fill_(-float("inf") if FAULT else -1.0)
    furthest = (1 - others).max(1).values if FAULT else (1 - others).min(1).values
    loss = F.relu(1 - similar.diagonal() - furthest + 0.5).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
