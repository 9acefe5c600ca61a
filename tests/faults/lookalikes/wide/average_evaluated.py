"""An average of the weights is evaluated in place of the model."""

import argparse

import torch
from torch import nn

STEPS = 250


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(x)))


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    model.eval()
    return (model(x).argmax(1) == y).float().mean().item()


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model, weights = Net(), torch.randn(16, 5)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    known = torch.randn(200, 16)
    for step in range(steps):
        x = torch.randn(64, 16)
        loss = nn.functional.cross_entropy(model(x), (x @ weights).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        if step % 40 == 39:
            print(step, accuracy(average, known, (known @ weights).argmax(1)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
