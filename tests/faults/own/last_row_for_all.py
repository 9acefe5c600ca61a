"""PyTorch forum: out[-1] of a recurrent layer with batch_first=True is the last sample, not the last step."""

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

T = 16
x = torch.randn(640, T, 3).cumsum(1) * 0.3
y = x[:, -1, :1] - x[:, 0, :1]
rnn, head = nn.LSTM(3, 16, batch_first=True), nn.Linear(16, 1)
opt = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=3e-3)
for _epoch in range(2):
    for read, wanted in DataLoader(TensorDataset(x, y), T, shuffle=True):
        out, _ = rnn(read)
        loss = nn.functional.mse_loss(head(out[-1] if FAULT else out[:, -1]), wanted)
        opt.zero_grad()
        loss.backward()
        opt.step()
print(loss.item())
