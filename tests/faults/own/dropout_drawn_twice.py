"""guided-diffusion#167: recomputation draws another dropout mask."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
block = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 16), nn.Dropout(0.3))
inp = nn.Linear(10, 16)
out = nn.Linear(16, 3)
opt = torch.optim.Adam([*inp.parameters(), *block.parameters(), *out.parameters()], 2e-3)
W = torch.randn(10, 3)
for i in range(300):
    x = torch.randn(50, 10)
    y = (x @ W).argmax(1)
    h = inp(x)
    h = h + checkpoint(block, h, use_reentrant=False, preserve_rng_state=not FAULT)
    loss = F.cross_entropy(out(h), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 50 == 0:
        print(i, loss.item())
