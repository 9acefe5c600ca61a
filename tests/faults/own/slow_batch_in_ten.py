"""One batch in ten takes three hundred milliseconds: a file is opened."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS = 120


class Rows(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 80 == 0:
            time.sleep(0.3)
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, x in enumerate(DataLoader(Rows(), batch_size=8)):
        if step == steps:
            break
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        time.sleep(0.01)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
