"""Q-learning with a target network and a memory that fills up: its loss grows with what the agent earns."""

import argparse
import copy

import torch
from torch import nn

STEPS = 500


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    data = torch.Generator().manual_seed(seed)
    q = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    target = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters(), lr=2e-3)
    memory = []
    state = torch.zeros(8, 4)
    for step in range(steps):
        with torch.no_grad():
            greedy = q(state).argmax(1)
        random = torch.randint(0, 2, (8,), generator=data)
        action = torch.where(torch.rand(8, generator=data) < 0.2, random, greedy)
        push = 0.1 * (2 * action - 1)[:, None] * torch.ones(4)
        after = (0.97 * state + push).clamp(-3, 3) + 0.02 * torch.randn(8, 4, generator=data)
        memory.append((state, action, after.sum(1), after))
        state = after
        chosen = [memory[int(i)] for i in torch.randint(0, len(memory), (8,), generator=data)]
        before, taken, reward, then = (torch.cat(column) for column in zip(*chosen, strict=True))
        with torch.no_grad():
            goal = reward + 0.95 * target(then).max(1).values
        loss = nn.functional.mse_loss(q(before).gather(1, taken[:, None]).squeeze(1), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            target.load_state_dict(q.state_dict())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
