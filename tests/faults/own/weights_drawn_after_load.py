"""picotron#32: initial values are drawn after the checkpoint was loaded."""

import argparse
import io

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
X = torch.randn(1000, 12)
Y = (X[:, :5].sum(1) > 0).long()


def build():
    return nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))


def init(m):
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        nn.init.zeros_(m.bias)


old = build()
o = torch.optim.Adam(old.parameters(), 2e-3)
for _i in range(100):
    idx = torch.randint(0, 1000, (50,))
    loss = F.cross_entropy(old(X[idx]), Y[idx])
    o.zero_grad()
    loss.backward()
    o.step()
checkpoint = io.BytesIO()
torch.save(old.state_dict(), checkpoint)
checkpoint.seek(0)
del o, old
net = build()
if not FAULT:
    net.apply(init)
net.load_state_dict(torch.load(checkpoint))
if FAULT:
    net.apply(init)
opt = torch.optim.Adam(net.parameters(), 5e-4)
for epoch in range(5):
    for idx in torch.randperm(1000).split(25):
        loss = F.cross_entropy(net(X[idx]), Y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(epoch, loss.item())
