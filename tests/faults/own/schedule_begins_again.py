"""D-X-Y/NAS-Bench-201#19: model and optimizer are resumed, their schedule is not."""

import argparse
import copy

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--healthy", action="store_true")
given = parser.parse_args()
FAULT = not given.healthy
torch.manual_seed(given.seed)

net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
kept = None
for _part in range(2):
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch)
    if kept is not None:
        opt.load_state_dict(kept[0])
        if not FAULT:
            schedule.load_state_dict(kept[1])
    for step in range(120):
        x = torch.randn(16, 6)
        loss = nn.functional.mse_loss(net(x), x[:, :1] ** 2)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 30 == 29:
            schedule.step()
    kept = copy.deepcopy((opt.state_dict(), schedule.state_dict()))
print(loss.item())
