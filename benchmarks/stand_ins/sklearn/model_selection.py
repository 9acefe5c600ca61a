from typing import Any

import numpy as np


def train_test_split(*arrays: Any, test_size: float = 0.25, random_state: int | None = None, **more: Any) -> list[Any]:
    seed = np.random.randint(2**31) if random_state is None else random_state  # as scikit-learn: the global generator
    order = np.random.default_rng(seed).permutation(len(arrays[0]))
    held = round(len(order) * test_size)
    return [part for array in arrays for part in (array[order[held:]], array[order[:held]])]
