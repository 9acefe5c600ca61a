"""huggingface/datasets#6673: workers that live on keep the epoch that they were born with."""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)


class Rows(Dataset):
    def __init__(self):
        self.y = torch.randint(0, 3, (400,))
        self.x = torch.randn(400, 12)
        self.epoch = 0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(1000 * self.epoch + i)
        return self.x[i] + 0.5 * torch.randn(12, generator=g), self.y[i]


rows = Rows()
loader = DataLoader(rows, 20, shuffle=True, num_workers=2, persistent_workers=FAULT)
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 3))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for epoch in range(6):
    rows.epoch = epoch
    for x, y in loader:
        loss = nn.functional.cross_entropy(net(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
print(loss.item())
