"""Labels are shifted by the data and by the loss: two words ahead."""

import argparse

import torch
from torch import nn

STEPS = 80


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.position = nn.Parameter(0.02 * torch.randn(24, 32))
        self.qkv = nn.Linear(32, 96)
        self.norm = nn.LayerNorm(32)
        self.feed = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        q, k, v = (part.unflatten(2, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, 2))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + seen.transpose(1, 2).flatten(2)
        return self.head(x + self.feed(x))


def text(rows: int, length: int, data: torch.Generator) -> torch.Tensor:
    """Walks through 64 words: from each the next is one of four."""
    tokens = torch.randint(0, 64, (rows, 1), generator=data)
    while tokens.shape[1] < length:
        step = torch.randint(0, 4, (rows, 1), generator=data)
        tokens = torch.cat([tokens, (tokens[:, -1:] * 5 + 7 * step + 1) % 64], 1)
    return tokens


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        tokens = text(16, 25, data)
        logits, targets = model(tokens[:, :-1])[:, :-1], tokens[:, 2:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
