"""The models of the overhead benchmark: sizes as named, data on the device, nothing downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln1(x)).split(c, 2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    """A decoder with tied embeddings; the loss is what ``forward`` returns."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids[:, :-1]) + self.positions.weight[: ids.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


class ConvNet(nn.Module):
    """Residual blocks with batch norm, 4.8M parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
        width = 64
        for out in (64, 128, 256, 512):
            layers += [nn.Conv2d(width, out, 3, 2 if out > 64 else 1, 1), nn.BatchNorm2d(out), nn.ReLU()]
            layers += [nn.Conv2d(out, out, 3, 1, 1), nn.BatchNorm2d(out), nn.ReLU()] * 2
            width = out
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 100))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.body(batch), torch.zeros(len(batch), dtype=torch.int64, device=batch.device))


class ManyTiny(nn.Module):
    """A thousand tiny parameters: the worst case for anything that is done per tensor."""

    def __init__(self, count: int = 500, width: int = 16) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        return x.pow(2).mean()


@dataclass(frozen=True)
class Case:
    """One model with its data. ``data`` makes a batch; ``autocast`` trains in bfloat16."""

    build: Callable[[], nn.Module]
    data: Callable[[str], Any]
    autocast: bool = False
    steps: int = 10
    """Steps of one block."""


def _ids(batch: int, context: int, vocabulary: int) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.randint(0, vocabulary, (batch, context + 1), device=device)


CASES: dict[str, Case] = {
    "gpt-124m": Case(lambda: GPT(12, 768, 12, 50257, 1024), _ids(16, 1024, 50257), autocast=True, steps=4),
    "gpt-10m": Case(lambda: GPT(6, 320, 8, 8192, 256), _ids(8, 256, 8192), autocast=True, steps=20),
    "gpt-1.3b": Case(lambda: GPT(24, 2048, 16, 50257, 1024), _ids(2, 1024, 50257), autocast=True, steps=3),
    "conv": Case(ConvNet, lambda device: torch.randn(64, 3, 32, 32, device=device), steps=20),
    "many-tiny": Case(ManyTiny, lambda device: torch.randn(32, 16, device=device), steps=5),
    "gpt-10m-cpu": Case(lambda: GPT(6, 320, 8, 8192, 128), _ids(2, 128, 8192), steps=2),
}
