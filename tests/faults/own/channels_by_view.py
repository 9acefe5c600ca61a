"""PyTorch forum: (height, width, channels) becomes (channels, height, width) by view, not by permute."""

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

smooth = nn.functional.interpolate(torch.rand(320, 3, 4, 4), size=16, mode="bilinear") * torch.tensor(
    [1.0, 0.6, 0.3]
).view(3, 1, 1)
y = (smooth[:, 0].mean((1, 2)) > 0.5).long()
pictures = smooth.permute(0, 2, 3, 1).contiguous()
x = pictures.view(320, 3, 16, 16) if FAULT else pictures.permute(0, 3, 1, 2)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for _epoch in range(4):
    for read, wanted in DataLoader(TensorDataset(x, y), 20, shuffle=True):
        loss = nn.functional.cross_entropy(net(read), wanted)
        opt.zero_grad()
        loss.backward()
        opt.step()
print(loss.item())
