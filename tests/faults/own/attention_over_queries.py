"""The softmax of attention runs over the queries."""

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


class Att(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(30, 32)
        self.q = nn.Linear(32, 32)
        self.k = nn.Linear(32, 32)
        self.v = nn.Linear(32, 32)
        self.o = nn.Linear(32, 5)

    def forward(self, ids):
        x = self.e(ids)
        s = self.q(x) @ self.k(x).transpose(1, 2) / 32**0.5
        a = s.softmax(dim=1 if FAULT else 2)
        return self.o((x + a @ self.v(x)).mean(1))


net = Att()
opt = torch.optim.Adam(net.parameters(), 2e-3)
for _i in range(250):
    ids = torch.randint(0, 30, (32, 9))
    y = ids.max(1).values // 6
    loss = F.cross_entropy(net(ids), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
