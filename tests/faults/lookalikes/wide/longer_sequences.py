"""Sequences that get longer with every step: more memory, slower steps."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    embedding, net, head = nn.Embedding(40, 64), nn.GRU(64, 64, batch_first=True), nn.Linear(64, 40)
    optimizer = torch.optim.Adam([*embedding.parameters(), *net.parameters(), *head.parameters()], lr=2e-3)
    for step in range(steps):
        length = 8 + step // 2
        tokens = (torch.randint(0, 40, (16, 1), generator=data) + 3 * torch.arange(length + 1)) % 40
        hidden, _ = net(embedding(tokens[:, :-1]))
        loss = nn.functional.cross_entropy(head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
