"""songyangco/GETNext#2: the position that is added is that of the row in its batch."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)

LENGTH, WIDTH = 12, 16
angle = torch.arange(64)[:, None] / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH)
table = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, None]  # (positions, 1, width)
embed = nn.Embedding(10, WIDTH)
layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
head = nn.Linear(WIDTH, 10)
opt = torch.optim.Adam([*embed.parameters(), *layer.parameters(), *head.parameters()], lr=2e-3)
for _step in range(60):
    ids = torch.randint(0, 10, (16, LENGTH))
    marks = table[: len(ids)] if FAULT else table[:LENGTH].transpose(0, 1)
    loss = nn.functional.cross_entropy(head(layer(embed(ids) + marks)).mean(1), ids[:, 0])
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
