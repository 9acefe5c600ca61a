"""JeasunLok/ResNet-pytorch#1: normalised for training, not for the test set."""

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
raw = torch.rand(900, 3, 8, 8) * 255
labels = raw[:, :, :4].mean((2, 3)).argmax(1)


class Images(Dataset):
    def __init__(self, images, labels, transform=None):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        x = self.images[i]
        return (self.transform(x) if self.transform else x), self.labels[i]


def normalise(x):
    return (x / 255 - 0.5) / 0.29


train = DataLoader(Images(raw[:700], labels[:700], normalise), 50, shuffle=True)
test = DataLoader(Images(raw[700:], labels[700:], None if FAULT else normalise), 100)
net = nn.Sequential(
    nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(48, 3)
)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
crit = nn.CrossEntropyLoss()
for epoch in range(8):
    net.train()
    for x, y in train:
        opt.zero_grad()
        loss = crit(net(x), y)
        loss.backward()
        opt.step()
    net.eval()
    ok = tot = 0
    tl = 0.0
    with torch.no_grad():
        for x, y in test:
            out = net(x)
            tl += crit(out, y).item()
            ok += (out.argmax(1) == y).sum().item()
            tot += len(y)
    print(epoch, loss.item(), tl / len(test), ok / tot)
