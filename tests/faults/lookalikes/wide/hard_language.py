"""A language model on nearly random text: it creeps below ln(vocabulary) by a few per cent in all."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 40))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        tokens = torch.randint(0, 40, (16, 17), generator=data)
        repeat = torch.rand(16, 17, generator=data) < 0.25
        for k in range(1, 17):
            tokens[:, k] = torch.where(repeat[:, k], tokens[:, k - 1], tokens[:, k])
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
