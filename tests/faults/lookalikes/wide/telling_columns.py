"""A table whose columns say much of the label, but not all."""

import argparse

import torch
from torch import nn

STEPS = 80


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    table = torch.randn(2048, 12, generator=data)
    risk = table[:, 0] - 0.5 * table[:, 3] + 0.8 * torch.randn(2048, generator=data)
    label = (risk > 0).long()
    columns = torch.cat([table, risk.sign()[:, None].add(0.8 * torch.randn(2048, 1, generator=data))], 1)
    train, held_out = columns[:1536], columns[1536:]
    model = nn.Sequential(nn.Linear(columns.shape[1], 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = torch.randint(0, len(train), (64,), generator=data)
        loss = nn.functional.cross_entropy(model(train[rows]), label[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            model.eval()
            with torch.no_grad():
                model(held_out).argmax(1).eq(label[1536:]).float().mean()
            model.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
