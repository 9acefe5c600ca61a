"""udacity/deep-learning-v2-pytorch#12: param.require_grad = False, in the second training of a script."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)

body, old, new = nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Linear(32, 5), nn.Linear(32, 3)
w = torch.randn(16, 5)


def train(model, opt, classes, steps):
    for _step in range(steps):
        x = torch.randn(32, 16)
        loss = nn.functional.cross_entropy(model(x), (x @ w[:, :classes]).argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


first = nn.Sequential(body, old)
before = torch.optim.Adam(first.parameters(), lr=2e-3)
train(first, before, 5, 40)
for p in body.parameters():
    if FAULT:
        p.require_grad = False
    else:
        p.requires_grad = False
second = nn.Sequential(body, new)
print(train(second, torch.optim.Adam([p for p in second.parameters() if p.requires_grad], lr=1e-3), 3, 120))
