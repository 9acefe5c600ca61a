"""aimagelab/meshed-memory-transformer#71: scheduler.step() per batch, of a schedule that counts epochs."""

import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
X = torch.randn(640, 20)
Y = X @ torch.randn(20, 5)
data = DataLoader(TensorDataset(X, Y.argmax(1)), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = MultiStepLR(optimizer, milestones=[10, 15], gamma=0.1)
criterion = nn.CrossEntropyLoss()


def train_one_epoch(epoch):
    model.train()
    for inputs, labels in data:
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if FAULT:
            scheduler.step()
    if not FAULT:
        scheduler.step()
    return loss.item()


for epoch in range(20):
    print(epoch, train_one_epoch(epoch), optimizer.param_groups[0]["lr"])
