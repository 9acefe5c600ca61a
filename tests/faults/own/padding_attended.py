"""QwenLM/Qwen#719: padding is attended to, because the mask is not passed on."""

import argparse

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)

embed = nn.Embedding(30, 16)
layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
head = nn.Linear(16, 2)
opt = torch.optim.Adam([*embed.parameters(), *layer.parameters(), *head.parameters()], lr=2e-3)
for _step in range(60):
    rows = [torch.randint(1, 30, (int(n),)) for n in torch.randint(4, 14, (16,))]
    ids = pad_sequence(rows, batch_first=True)
    wanted = torch.tensor([int(row.float().mean() > 15) for row in rows])
    h = layer(embed(ids), src_key_padding_mask=None if FAULT else ids == 0)
    loss = nn.functional.cross_entropy(head(h[:, 0]), wanted)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
