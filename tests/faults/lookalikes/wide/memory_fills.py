"""A memory of past batches that is full after half of the run."""

import argparse
import collections

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 128))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    memory = collections.deque(maxlen=200)
    for _ in range(steps):
        memory.append(torch.randn(256, 128, generator=data).cumsum(1))
        batch = memory[int(torch.randint(0, len(memory), (1,), generator=data))]
        loss = nn.functional.mse_loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
