"""A distributed sampler that is told of each epoch, and rows that are augmented."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STEPS = 240


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    x = torch.randn(640, 20, generator=data)
    y = (x @ torch.randn(20, 4, generator=data)).argmax(1)
    rows = TensorDataset(x, y)
    sampler = DistributedSampler(rows, num_replicas=1, rank=0, seed=seed)
    loader = DataLoader(rows, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(steps // len(loader)):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs + 0.1 * torch.randn_like(inputs)), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
