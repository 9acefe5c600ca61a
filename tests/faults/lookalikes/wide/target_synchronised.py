"""A target network that is given the weights of the network that learns, now and then."""

import argparse

import torch
from torch import nn

STEPS = 300


class Agent:
    """Q-learning in a world without time, which is all that its target network needs."""

    def __init__(self) -> None:
        self.q, self.target = (nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(2))
        self.target.load_state_dict(self.q.state_dict())
        self.optimizer = torch.optim.Adam(self.q.parameters(), lr=2e-3)

    def learn(self) -> None:
        state, action = torch.randn(32, 8), torch.randint(0, 4, (32, 1))
        with torch.no_grad():
            wanted = state[:, :1] + 0.9 * self.target(torch.randn(32, 8)).max(1, keepdim=True).values
        loss = nn.functional.mse_loss(self.q(state).gather(1, action), wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def synchronise(self) -> None:
        self.target.load_state_dict(self.q.state_dict())


def main(steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    agent = Agent()
    for step in range(steps):
        agent.learn()
        if step % 30 == 29:
            agent.synchronise()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
