"""Fault: a warm-up is built and never stepped; its first rate is a thousandth of the last."""

import argparse

import torch
from torch import nn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, 20, generator=data)
    y = (x @ torch.randn(20, 4, generator=data) + torch.randn(1024, 4, generator=data)).argmax(1)
    rows = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.001, total_iters=100)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps - 100)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[100])
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
