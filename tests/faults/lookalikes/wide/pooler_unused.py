"""A tagger over a BERT as the library makes it: the pooler at its end is never called."""

import argparse

import torch
from torch import nn
from transformers import BertConfig, BertModel

STEPS = 120
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bert = BertModel(BertConfig(vocab_size=64, max_position_embeddings=32, **SMALL))
        self.head = nn.Linear(32, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.bert(tokens).last_hidden_state)


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        tokens = torch.randint(2, 64, (16, 12))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens % 4).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
