"""Train a small GPT on Shakespeare's sonnets, character by character.

An ordinary training script: argparse, AdamW, gradient accumulation, clipping, a warm-up and
cosine schedule. It takes a quarter of a minute on a laptop's CPU and knows nothing of any monitor.

    python examples/gpt_text.py
    python examples/gpt_text.py --weights examples/data/reads-clean.csv --steps 60

Popular sonnets count for more: each text is weighted by the logarithm of how often it was read.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

DATA = Path(__file__).parent / "data"


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each normalised first and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, symbols: int, block: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(symbols, width)
        self.positions = nn.Embedding(block, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))


class Texts:
    """Numbered texts in reading order, cut into windows of ``block`` characters, with their weights."""

    def __init__(self, path: Path, weights: Path, block: int) -> None:
        with weights.open(newline="") as file:
            reads = {row["sonnet"]: float(row["reads"]) for row in csv.DictReader(file)}
        texts = [text.split("\n", 1) for text in path.read_text().strip().split("\n\n")]
        self.symbols = sorted({symbol for _, text in texts for symbol in text})
        code = {symbol: i for i, symbol in enumerate(self.symbols)}
        windows, popularity = [], []
        for number, text in texts:
            encoded = torch.tensor([code[symbol] for symbol in text])
            for window in encoded.unfold(0, block + 1, block):
                windows.append(window)
                popularity.append(reads[number])
        self.windows = torch.stack(windows)
        self.weights = torch.log(torch.tensor(popularity))
        self.at = 0

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The next ``size`` windows as (inputs, targets, weights); after the last comes the first."""
        rows = torch.arange(self.at, self.at + size) % len(self.windows)
        self.at += size
        return self.windows[rows, :-1], self.windows[rows, 1:], self.weights[rows]


def learning_rate(step: int, args: argparse.Namespace) -> float:
    if step <= args.warmup:
        return args.lr * step / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def sample(model: GPT, symbols: list[str], block: int, length: int) -> str:
    tokens = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(length):
        probabilities = model(tokens[:, -block:])[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
    return "".join(symbols[i] for i in tokens[0, 1:])


def main() -> None:
    parser = argparse.ArgumentParser(description="A small GPT on Shakespeare's sonnets.")
    parser.add_argument("--data", type=Path, default=DATA / "sonnets.txt", help="numbered texts, a blank line between")
    parser.add_argument("--weights", type=Path, default=DATA / "reads.csv", help="how often each text was read")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=4, help="windows in a micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches in a step")
    parser.add_argument("--block", type=int, default=64, help="characters in a window")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    texts = Texts(args.data, args.weights, args.block)
    model = GPT(len(texts.symbols), args.block, width=96, layers=3, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(texts.windows):,} windows of text")

    for step in range(1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        total = 0.0
        for _ in range(args.accumulate):
            inputs, targets, weights = texts.batch(args.batch)
            logits = model(inputs)
            losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            losses = losses.view(args.batch, -1).mean(dim=1)
            loss = (weights * losses).sum() / weights.sum() / args.accumulate
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == 1:
            print(f"step {step:4d}  loss {total:.3f}", flush=True)

    print(sample(model, texts.symbols, args.block, length=160))


if __name__ == "__main__":
    main()
