"""Stack Overflow: nn.ModuleList([layer] * n) is one layer."""

import argparse
import copy

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)


class Encoder(nn.Module):
    def __init__(self, layer, n):
        super().__init__()
        self.layers = nn.ModuleList([layer] * n if FAULT else [copy.deepcopy(layer) for _ in range(n)])
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x)


model = Encoder(nn.Linear(32, 32), 4)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
w = torch.randn(32, 5)
for _step in range(200):
    x = torch.randn(32, 32)
    loss = nn.functional.cross_entropy(model(x), (x @ w).argmax(1))
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
