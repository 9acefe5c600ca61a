"""Full-batch training through a loader: the whole data set is one batch, the same in every epoch."""

import argparse

import torch
from torch import nn

STEPS = 150


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    x = torch.randn(200, 8, generator=data)
    rows = torch.utils.data.TensorDataset(x, x.sin().sum(1, keepdim=True))
    for _ in range(steps):
        for some, wanted in torch.utils.data.DataLoader(rows, batch_size=len(rows)):
            loss = nn.functional.mse_loss(model(some), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
