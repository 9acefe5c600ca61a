"""FuxiCTR#30: heads of attention are split by a view, without a transpose."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def split(self, x):
        rows, time, width = x.shape
        if FAULT:
            return x.view(rows * self.heads, time, width // self.heads)
        return x.view(rows, time, self.heads, -1).transpose(1, 2).flatten(0, 1)

    def forward(self, x):
        rows, time, width = x.shape
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        out = (q @ k.transpose(1, 2) * (width // self.heads) ** -0.5).softmax(-1) @ v
        return out.view(rows, self.heads, time, -1).transpose(1, 2).flatten(2)


embed, attend, head = nn.Embedding(20, 32), Attention(32, 4), nn.Linear(32, 20)
opt = torch.optim.Adam([*embed.parameters(), *attend.parameters(), *head.parameters()], lr=2e-3)
for _step in range(60):
    ids = torch.randint(0, 20, (16, 6))
    x = embed(ids)
    loss = nn.functional.cross_entropy(head(x + attend(x)).flatten(0, 1), ids.roll(1, 1).flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
