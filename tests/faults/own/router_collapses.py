"""A router without a load-balancing loss: it sends all tokens to the expert that began best, and trains only that one."""

import argparse

import torch
from torch import nn

STEPS = 320


class Mixture(nn.Module):
    """One expert a token (Switch Transformers), weighted with the router's probability."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                out[mine] = expert(tokens[mine]) * weight[mine].unsqueeze(-1)
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.mixture = Mixture(16, 8)
        self.last = nn.Linear(16, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).relu()
        return self.last(hidden + self.mixture(hidden)).squeeze(-1)


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    net = Net()
    with torch.no_grad():
        net.mixture.router.bias[3] = 4.0  # the one that it likes best from the start
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for _ in range(steps):
        inputs = torch.randn(64, 8)
        target = (inputs[:, 0] * inputs[:, 1]).sin() + inputs[:, 2]
        loss = nn.functional.mse_loss(net(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
