"""The same mixture with a load-balancing loss and a router that begins without a favourite; a rare expert may rest."""

import argparse

import torch
from torch import nn

STEPS = 320
EXPERTS = 8


class Mixture(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(EXPERTS)
        )
        self.balance = torch.zeros(())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.gate(tokens).softmax(-1)
        weight, chosen = scores.topk(2, dim=-1)
        share = nn.functional.one_hot(chosen, EXPERTS).float().mean((0, 1))
        self.balance = EXPERTS * (share * scores.mean(0)).sum()
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, expert(tokens[row]) * weight[row, place].unsqueeze(-1))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.mixture = Mixture(16)
        self.last = nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).relu()
        return self.last(hidden + self.mixture(hidden)).squeeze(-1)


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(steps):
        inputs = torch.randn(64, 8)
        target = (inputs[:, 0] * inputs[:, 1]).sin() + inputs[:, 2]
        loss = nn.functional.mse_loss(net(inputs), target) + 0.03 * net.mixture.balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
