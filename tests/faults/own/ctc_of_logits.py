"""STARS#9: ctc_loss is given logits."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
rnn = nn.GRU(8, 32, batch_first=True)
head = nn.Linear(32, 6)
opt = torch.optim.Adam([*rnn.parameters(), *head.parameters()], 3e-3)
table = torch.randn(6, 8)
for step in range(250):
    y = torch.randint(1, 6, (16, 4))
    x = table[y.repeat_interleave(3, 1)] + 0.3 * torch.randn(16, 12, 8)
    out = head(rnn(x)[0])
    lp = out if FAULT else out.log_softmax(-1)
    loss = F.ctc_loss(lp.transpose(0, 1), y, torch.full((16,), 12), torch.full((16,), 4))
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 0:
        print(step, loss.item())
