"""A large embedding with rare tokens: most rows get no gradient in most steps, some tables are sparse."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    table = nn.EmbeddingBag(500, 16, sparse=True)
    head = nn.Linear(16, 4)
    for_table = torch.optim.SparseAdam(table.parameters(), lr=5e-2)
    for_head = torch.optim.Adam(head.parameters(), lr=1e-2)
    for _ in range(steps):
        words = (torch.rand(32, 6, generator=data) ** 3 * 500).long()
        target = words[:, 0] % 4
        loss = nn.functional.cross_entropy(head(table(words)), target)
        for_table.zero_grad()
        for_head.zero_grad()
        loss.backward()
        for_table.step()
        for_head.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
