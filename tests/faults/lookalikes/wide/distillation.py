"""A trained-looking teacher in eval mode with requires_grad left on, under no_grad; only the student is in the optimizer."""

import argparse

import torch
from torch import nn

STEPS = 250


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)).eval()
    student = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    for _ in range(steps):
        x = torch.randn(64, 12, generator=data)
        with torch.no_grad():
            soft = (teacher(x) * 4).softmax(1)
        loss = nn.functional.kl_div(student(x).log_softmax(1), soft, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
