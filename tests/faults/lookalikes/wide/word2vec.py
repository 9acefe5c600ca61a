"""Skip-grams with negative samples: context vectors start at zero, both tables are sparse, the loss starts at 6 ln 2."""

import argparse

import torch
from torch import nn

STEPS = 600


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    words, dim = 2000, 32
    centre, context = nn.Embedding(words, dim, sparse=True), nn.Embedding(words, dim, sparse=True)
    nn.init.uniform_(centre.weight, -0.5 / dim, 0.5 / dim)
    nn.init.zeros_(context.weight)
    optimizer = torch.optim.SparseAdam([*centre.parameters(), *context.parameters()], lr=2e-3)
    topic = torch.randint(20, (words,))
    by = [torch.nonzero(topic == k).squeeze(1) for k in range(20)]
    for _ in range(steps):
        c = torch.randint(words, (128,))
        o = torch.stack([by[topic[i]][torch.randint(len(by[topic[i]]), ())] for i in c])
        neg = torch.randint(words, (128, 5))
        v = centre(c)
        pos = nn.functional.logsigmoid((v * context(o)).sum(1))
        bad = nn.functional.logsigmoid(-(context(neg) @ v[:, :, None]).squeeze(2)).sum(1)
        loss = -(pos + bad).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
