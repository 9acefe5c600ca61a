"""A character model that learns slowly: for long it knows hardly more than how often each comes."""

import argparse

import torch
from torch import nn

STEPS = 1500

CHARS = 40


class Tiny(nn.Module):
    """One block of a character model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(CHARS, 32), nn.Embedding(32, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, CHARS)
        self.mask = nn.Transformer.generate_square_subsequent_mask(32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return self.head(self.block(x, src_mask=self.mask, is_causal=True))


def text(data: torch.Generator) -> torch.Tensor:
    """Characters of unequal frequency, of which each depends on the one before."""
    often = torch.softmax(1.5 * torch.randn(CHARS, generator=data), 0)
    after = often * torch.exp(2 * torch.randn(CHARS, CHARS, generator=data))
    ids = [0]
    for _ in range(20_000):
        ids.append(int(torch.multinomial(after[ids[-1]], 1, generator=data)))
    return torch.tensor(ids)


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = text(data)
    for _ in range(steps):
        at = torch.randint(0, len(ids) - 33, (16, 1), generator=data) + torch.arange(32)
        x, y = ids[at], ids[at + 1]
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
