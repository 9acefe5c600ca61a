"""A loss that is summed over tokens: values in the thousands, with a rate to match and clipping."""

import argparse

import torch
from torch import nn

STEPS = 250


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        tokens = torch.randint(0, 64, (32, 33), generator=data).cumsum(1) % 64
        tokens = (tokens[:, :1] + 5 * torch.arange(33)) % 64
        loss = nn.functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
