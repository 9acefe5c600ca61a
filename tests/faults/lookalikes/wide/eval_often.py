"""An evaluation in eval mode every third step, under no_grad, and back to train mode."""

import argparse

import torch
from torch import nn

STEPS = 240


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(10, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def batch():
        x = torch.randn(64, 10, generator=data)
        return x, x[:, :5].argmax(1)

    for step in range(steps):
        if step % 3 == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(2):
                    x, y = batch()
                    nn.functional.cross_entropy(model(x), y)
            model.train()
        x, y = batch()
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
