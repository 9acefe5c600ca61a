"""Copy and paste: the validation loader is made of the training set."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
X = torch.randn(500, 30)
Y = (X[:, 0] + torch.randn(500) > 0).long()
full = TensorDataset(X, Y)
train_set, val_set = Subset(full, range(400)), Subset(full, range(400, 500))
train_loader = DataLoader(train_set, 25, shuffle=True)
val_loader = DataLoader(train_set if FAULT else val_set, 100)
net = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))
opt = torch.optim.Adam(net.parameters(), lr=5e-4)
crit = nn.CrossEntropyLoss()
for epoch in range(8):
    net.train()
    for x, y in train_loader:
        opt.zero_grad()
        loss = crit(net(x), y)
        loss.backward()
        opt.step()
    net.eval()
    with torch.no_grad():
        print(epoch, sum(crit(net(x), y).item() for x, y in val_loader) / len(val_loader))
