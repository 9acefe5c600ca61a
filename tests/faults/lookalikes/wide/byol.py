"""A student predicts an EMA teacher that has no gradient and is in no optimizer."""

import argparse
import copy

import torch
from torch import nn

STEPS = 250


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    student = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    predictor = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam([*student.parameters(), *predictor.parameters()], lr=1e-3)
    for _ in range(steps):
        x = torch.randn(64, 16, generator=data)
        one, two = x + 0.2 * torch.randn(64, 16, generator=data), x + 0.2 * torch.randn(64, 16, generator=data)
        with torch.no_grad():
            target = teacher(two)
        loss = 2 - 2 * nn.functional.cosine_similarity(predictor(student(one)), target).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast, 0.01)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
