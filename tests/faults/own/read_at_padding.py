"""practical-torchtext#5, ray#21392: the last position of padded rows is read."""

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
        self.embed = nn.Embedding(30, 16, padding_idx=0)
        self.rnn = nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, ids, lengths):
        out, _ = self.rnn(self.embed(ids))
        return self.head(out[:, -1] if FAULT else out[torch.arange(len(ids)), lengths - 1])


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
for _step in range(60):
    lengths = torch.randint(2, 15, (24,))
    ids = torch.randint(1, 30, (24, 14)) * (torch.arange(14) < lengths[:, None])
    y = ids[torch.arange(24), lengths - 1] % 5
    loss = nn.functional.cross_entropy(net(ids, lengths), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(loss.item())
