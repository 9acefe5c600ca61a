"""catalyst-team/catalyst#79: `encoder.requires_grad = False` on a Module freezes nothing."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)


class Classifier(nn.Module):
    def __init__(self, freeze=True):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.out = nn.Linear(128, 3)
        if freeze:
            if FAULT:
                self.enc.requires_grad = False
            else:
                self.enc.requires_grad_(False)

    def forward(self, x):
        return self.out(self.enc(x))


model = Classifier()
opt = torch.optim.Adam(model.parameters() if FAULT else model.out.parameters(), lr=1e-2)
for _step in range(200):
    y = torch.randint(0, 3, (32,))
    x = torch.randn(32, 1, 12, 12) + y.view(-1, 1, 1, 1) - 1
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("loss", loss.item())
