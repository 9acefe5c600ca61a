"""ReduceLROnPlateau is stepped after each batch."""

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
X = torch.randn(800, 12)
Y = (X[:, :3].sum(1) > 0).long()
dl = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), 16, shuffle=True)
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 2))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.1, patience=3)
for epoch in range(8):
    tot = 0
    for x, y in dl:
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        tot += loss.item()
        if FAULT:
            sched.step(loss.item())
    if not FAULT:
        sched.step(tot / len(dl))
    print(epoch, tot / len(dl), opt.param_groups[0]["lr"])
