"""Matrix factorisation with pairwise ranking: both factors begin next to zero, and so the loss at exactly ln 2."""

import argparse

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    users, items = 400, 300
    u, v = nn.Embedding(users, 64), nn.Embedding(items, 64)
    nn.init.normal_(u.weight, std=0.01)
    nn.init.normal_(v.weight, std=0.01)
    taste, _kind = torch.randint(6, (users,)), torch.arange(items) % 6
    optimizer = torch.optim.Adam([*u.parameters(), *v.parameters()], lr=1e-3)
    for _ in range(steps):
        a = torch.randint(users, (256,))
        good = 6 * torch.randint(items // 6, (256,)) + taste[a]
        bad = torch.randint(items, (256,))
        loss = -nn.functional.logsigmoid((u(a) * (v(good) - v(bad))).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
