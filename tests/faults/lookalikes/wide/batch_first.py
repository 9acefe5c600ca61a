"""An LSTM that is told that the batch comes first."""

import argparse

import torch
from torch import nn

STEPS = 200


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.layer = nn.Embedding(40, 32), nn.LSTM(32, 48, batch_first=True)
        self.head = nn.Linear(48, 4)

    def forward(self, x):
        return self.head(self.layer(self.words(x))[0][:, -1])


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        x = torch.randint(0, 40, (32, 12), generator=data)
        loss = nn.functional.cross_entropy(model(x), (x[:, :6] > 19).sum(1) // 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
