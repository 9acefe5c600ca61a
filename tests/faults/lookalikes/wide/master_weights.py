"""Half-precision weights with a float32 copy that the optimizer holds; gradients are copied over and weights back, by hand."""

import argparse

import torch
from torch import nn

STEPS = 400


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    w = torch.randn(12, 3)
    model = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 3)).bfloat16()
    masters = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    for _ in range(steps):
        x = torch.randn(64, 12)
        loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), (x @ w).argmax(1))
        loss.backward()
        for m, p in zip(masters, model.parameters(), strict=True):
            m.grad = p.grad.float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for m, p in zip(masters, model.parameters(), strict=True):
                p.copy_(m)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
