import types
from typing import Any

import numpy as np


def make_moons(n_samples: int = 100, noise: float = 0.0, random_state: int = 0, **more: Any) -> Any:
    drawn = np.random.default_rng(random_state)
    half, angles = n_samples // 2, drawn.uniform(0, np.pi, n_samples)
    x = np.stack([np.cos(angles), np.sin(angles)], 1)
    x[half:] = [1, 0.5] - x[half:]
    return x + noise * drawn.normal(size=x.shape), np.arange(n_samples) >= half


def load_iris() -> Any:
    """Three clusters with the means and spreads of Fisher's irises."""
    drawn = np.random.default_rng(0)
    means = np.array([[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]])
    spreads = np.array([[0.35, 0.38, 0.17, 0.1], [0.52, 0.31, 0.47, 0.2], [0.64, 0.32, 0.55, 0.27]])
    target = np.repeat(np.arange(3), 50)
    return types.SimpleNamespace(data=means[target] + spreads[target] * drawn.normal(size=(150, 4)), target=target)
