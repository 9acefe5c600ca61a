"""Fault: a cosine schedule is built and never stepped."""

import argparse

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, 20, generator=data)
    y = (x @ torch.randn(20, 4, generator=data) + torch.randn(1024, 4, generator=data)).argmax(1)
    rows = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps // len(loader))
    for epoch in range(steps // len(loader)):
        for some, wanted in loader:
            loss = nn.functional.cross_entropy(model(some), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(epoch, loss.item(), scheduler.get_last_lr())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
