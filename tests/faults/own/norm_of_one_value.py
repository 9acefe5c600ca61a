"""pytorch#19250: a group norm with one channel a group, over maps of 1 x 1, puts out zeros."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU())
        self.context = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 16, 1), nn.GroupNorm(16 if FAULT else 4, 16)
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        h = self.conv(x)
        return self.head(torch.cat([h.mean((2, 3)), self.context(h).flatten(1)], 1))


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for _step in range(60):
    y = torch.randint(0, 4, (16,))
    x = torch.randn(16, 1, 8, 8)
    x[torch.arange(16), 0, y * 2] += 2.0
    loss = nn.functional.cross_entropy(net(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
