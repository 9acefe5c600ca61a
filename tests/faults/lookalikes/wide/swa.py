"""Stochastic weight averaging: from half way on the rate goes up to a constant and an averaged model is kept."""

import argparse

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

STEPS = 300


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averaged = AveragedModel(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps // 2)
    constant = SWALR(optimizer, swa_lr=0.05, anneal_epochs=10)
    batches = []
    for step in range(steps):
        x = torch.randn(64, 12, generator=data)
        batches = [*batches[-9:], x]
        loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step < steps // 2:
            schedule.step()
        else:
            constant.step()
            averaged.update_parameters(model)
    update_bn(batches, averaged)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
