"""A standard deviation of zero makes a whole column of one batch NaN."""

import argparse

import torch
from torch import nn

STEPS = 150


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rows = torch.randn(16 * steps, 10, generator=data)
    rows[16 * 70 : 16 * 71, 3] = 1.0
    targets = rows[:, :5].argmax(1)

    def normalised(batch):
        x = torch.stack([row for row, _ in batch])
        return (x - x.mean(0)) / x.std(0), torch.stack([y for _, y in batch])

    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(rows, targets), batch_size=16, collate_fn=normalised
    )
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
