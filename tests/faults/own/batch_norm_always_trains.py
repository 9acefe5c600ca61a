"""F.batch_norm(training=True) also in evaluation."""

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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Linear(10, 32)
        self.o = nn.Linear(32, 2)
        self.w = nn.Parameter(torch.ones(32))
        self.b = nn.Parameter(torch.zeros(32))
        self.register_buffer("m", torch.zeros(32))
        self.register_buffer("v", torch.ones(32))

    def forward(self, x):
        return self.o(
            F.relu(F.batch_norm(self.f(x), self.m, self.v, self.w, self.b, training=True if FAULT else self.training))
        )


net = Net()
opt = torch.optim.Adam(net.parameters(), 1e-3)
X = torch.randn(1200, 10)
Y = (X[:, :3].sum(1) > 0).long()
for epoch in range(8):
    net.train()
    for idx in torch.randperm(1000).split(25):
        loss = F.cross_entropy(net(X[idx]), Y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        print(epoch, sum(F.cross_entropy(net(X[i : i + 20]), Y[i : i + 20]).item() for i in range(1000, 1200, 20)) / 10)
