"""Padded sequences whose padding is ignored by the loss."""

import argparse

import torch
from torch import nn

STEPS = 200


WORDS, PAD, LONGEST = 40, 0, 32


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 48, padding_idx=PAD)
        self.layer, self.head = nn.GRU(48, 48, batch_first=True), nn.Linear(48, WORDS)

    def forward(self, x):
        return self.head(self.layer(self.words(x))[0])


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = Reader()
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        first = torch.randint(0, WORDS - 1, (16, 1), generator=data)
        x = (first + 2 * torch.arange(LONGEST)) % (WORDS - 1) + 1
        length = torch.randint(4, LONGEST, (16, 1), generator=data)
        x[torch.arange(LONGEST) >= length] = PAD
        loss = criterion(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
