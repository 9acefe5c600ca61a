"""huggingface/transformers#1563: gradients are clipped after each micro-batch, not once before the step."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
model = nn.Sequential(nn.Embedding(30, 16), nn.Flatten(), nn.Linear(16 * 6, 64), nn.GELU(), nn.Linear(64, 30))
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
accumulation = 4
for step in range(600):
    ids = torch.randint(0, 30, (16, 6))
    target = ids[:, 0]
    loss = nn.functional.cross_entropy(model(ids), target)
    (loss / accumulation).backward()
    if FAULT:
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    if (step + 1) % accumulation == 0:
        if not FAULT:
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        opt.step()
        opt.zero_grad()
    if step % 100 == 0:
        print(step, loss.item())
