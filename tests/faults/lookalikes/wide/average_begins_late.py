"""A schedule that is built with the model and begins in the last part of the training."""

import argparse

import torch
from torch import nn

STEPS = 480


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, 20, generator=data)
    y = (x @ torch.randn(20, 4, generator=data) + torch.randn(1024, 4, generator=data)).argmax(1)
    rows = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(rows, batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    for epoch in range(steps // len(loader)):
        for some, wanted in loader:
            loss = nn.functional.cross_entropy(model(some), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch >= 12:
            average.update_parameters(model)
            scheduler.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
