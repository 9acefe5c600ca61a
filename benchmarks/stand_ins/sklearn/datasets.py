from typing import Any

import numpy as np


def make_moons(n_samples: int = 100, noise: float = 0.0, random_state: int = 0, **more: Any) -> Any:
    drawn = np.random.default_rng(random_state)
    half, angles = n_samples // 2, drawn.uniform(0, np.pi, n_samples)
    x = np.stack([np.cos(angles), np.sin(angles)], 1)
    x[half:] = [1, 0.5] - x[half:]
    return x + noise * drawn.normal(size=x.shape), np.arange(n_samples) >= half
