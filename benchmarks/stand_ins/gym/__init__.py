"""A stand-in for gym, of which the scripts use one environment: a pole on a cart (Barto, Sutton and Anderson 1983)."""

import math
import types
from typing import Any

import numpy as np


class CartPole:
    """Four numbers (place, speed, angle, speed of the angle); two actions; a reward of 1 for each step that it stands."""

    spec = types.SimpleNamespace(reward_threshold=475.0)

    def reset(self, seed: int | None = None, **more: Any) -> tuple[Any, dict[str, Any]]:
        if seed is not None or not hasattr(self, "drawn"):
            self.drawn = np.random.default_rng(seed)
        self.state = self.drawn.uniform(-0.05, 0.05, 4)
        self.steps = 0
        return self.state.astype(np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        place, speed, angle, turning = self.state
        push = 10.0 if action == 1 else -10.0
        shove = (push + 0.05 * turning**2 * math.sin(angle)) / 1.1
        fall = (9.8 * math.sin(angle) - math.cos(angle) * shove) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
        pull = shove - 0.05 * fall * math.cos(angle) / 1.1
        self.state = np.array(
            [place + 0.02 * speed, speed + 0.02 * pull, angle + 0.02 * turning, turning + 0.02 * fall]
        )
        self.steps += 1
        fallen = bool(abs(self.state[0]) > 2.4 or abs(self.state[2]) > 12 * math.pi / 180)
        return self.state.astype(np.float32), 1.0, fallen, self.steps >= 500, {}

    def seed(self, *args: object) -> None: ...

    def render(self, *args: object) -> None: ...

    def close(self) -> None: ...


def make(name: str, **more: Any) -> CartPole:
    return CartPole()
