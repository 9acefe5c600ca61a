"""Six micro-batches per update, clipped; their losses differ, gradients are rightly there between them."""

import argparse

import torch
from torch import nn

STEPS = 120


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Embedding(50, 24), nn.Flatten(), nn.Linear(24 * 8, 64), nn.Tanh(), nn.Linear(64, 50))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        for _ in range(6):
            rows = int(torch.randint(2, 24, (1,), generator=data))
            tokens = torch.randint(0, 50, (rows, 8), generator=data)
            target = tokens[:, 0]
            (nn.functional.cross_entropy(model(tokens), target) / 6).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
