"""huggingface/diffusers#2632: the schedule is as long as the micro-batches, and stepped once an update: three quarters are never used."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)
accum, epochs = 4, 5
xs = torch.randn(1280, 12)
ys = torch.sin(xs @ torch.randn(12, 2))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(xs, ys), 16, shuffle=True)
model = nn.Sequential(nn.Linear(12, 64), nn.SiLU(), nn.Linear(64, 2))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
total = epochs * len(loader) if FAULT else epochs * len(loader) // accum
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=total)
n = 0
for epoch in range(epochs):
    for x, y in loader:
        loss = ((model(x) - y) ** 2).mean() / accum
        loss.backward()
        n += 1
        if n % accum == 0:
            opt.step()
            sched.step()
            opt.zero_grad()
    print(epoch, loss.item() * accum, opt.param_groups[0]["lr"])
