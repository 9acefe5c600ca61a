"""The validation loop was copied from the training loop, with backward and step."""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
x = torch.randn(800, 10)
y = (x[:, :2].prod(1) > 0).long()
loaders = {
    "train": DataLoader(TensorDataset(x[:600], y[:600]), 30, shuffle=True),
    "val": DataLoader(TensorDataset(x[600:], y[600:]), 50),
}
net = nn.Sequential(nn.Linear(10, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 2))
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
crit = nn.CrossEntropyLoss()
for epoch in range(8):
    for phase in ("train", "val"):
        net.train() if phase == "train" else net.eval()
        total = 0.0
        for inputs, labels in loaders[phase]:
            opt.zero_grad()
            with torch.set_grad_enabled(phase == "train" or bool(FAULT)):
                loss = crit(net(inputs), labels)
            if phase == "train" or FAULT:
                loss.backward()
                opt.step()
            total += loss.item()
        print(epoch, phase, total / len(loaders[phase]))
