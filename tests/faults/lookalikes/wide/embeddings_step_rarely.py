"""The optimizer of the embeddings steps after every fourth backward pass, on purpose."""

import argparse

import torch
from torch import nn

STEPS = 200


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    table, model = nn.Embedding(50, 16), nn.Linear(16, 5)
    rarely, always = torch.optim.SGD(table.parameters(), lr=0.1), torch.optim.Adam(model.parameters(), lr=1e-3)
    classes = torch.randint(0, 5, (50,))
    for step in range(steps):
        x = torch.randint(0, 50, (64,))
        loss = nn.functional.cross_entropy(model(table(x)), classes[x]) / 4
        always.zero_grad()
        loss.backward()
        always.step()
        if step % 4 == 3:
            rarely.step()
            rarely.zero_grad()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
