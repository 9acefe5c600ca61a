"""Data that are sorted by class are split at random."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

STEPS = 190


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    centres = torch.randn(10, 16)
    y = torch.arange(10).repeat_interleave(80)
    data = TensorDataset(centres[y] + 0.6 * torch.randn(800, 16), y)
    order = torch.randperm(800).tolist()
    train = DataLoader(Subset(data, order[:600]), batch_size=32, shuffle=True)
    held_out = DataLoader(Subset(data, order[600:]), batch_size=100)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps // 19):
        model.train()
        for x, labels in train:
            loss = nn.functional.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            print(sum(nn.functional.cross_entropy(model(x), labels).item() for x, labels in held_out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
