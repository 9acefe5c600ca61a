"""Dropout as a function that does not ask whether the model is in evaluation mode."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
torch.manual_seed(given.seed)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(8, 32), nn.Linear(32, 2), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(torch.relu(self.first(x)), 0.5, training=self.training or not given.healthy)
        return self.last(self.drop(x))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(300, 8)
y = (x[:, 0] > 0).long()
for _ in range(6):
    model.train()
    for i in range(0, 200, 20):
        optimizer.zero_grad()
        F.cross_entropy(model(x[i : i + 20]), y[i : i + 20]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(sum(F.cross_entropy(model(x[i : i + 20]), y[i : i + 20]).item() for i in range(200, 300, 20)))
