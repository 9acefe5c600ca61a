"""Stack Overflow: the second branch of a siamese network is a copy that nobody trains."""

import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
left = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 8))
right = copy.deepcopy(left) if FAULT else left
opt = torch.optim.Adam(left.parameters(), 1e-3)
for _i in range(300):
    a = torch.randn(40, 12)
    same = torch.rand(40) < 0.5
    b = torch.where(same[:, None], a + 0.1 * torch.randn(40, 12), torch.randn(40, 12))
    d = (left(a) - right(b)).pow(2).sum(1)
    loss = torch.where(same, d, F.relu(1 - (d + 1e-9).sqrt()).pow(2)).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
