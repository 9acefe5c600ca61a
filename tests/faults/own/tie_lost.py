"""Input and output embeddings are tied at first; a reload in mid-run gives the head a tensor of its own."""

import argparse

import torch
from torch import nn

STEPS = 160


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)).relu())


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        if step == 60:
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
            optimizer.add_param_group({"params": [model.head.weight]})
        tokens = torch.randint(0, 40, (64,), generator=data)
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 40)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
