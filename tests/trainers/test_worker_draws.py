"""What loader workers draw from: told by real workers, in their own processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest

pytest.importorskip("numpy")
pytestmark = pytest.mark.skipif(multiprocessing.get_start_method() != "fork", reason="only forked workers tell")

RULES = {"version": 1, "rules": {"alike": {"metric": "workers.alike", "when": {"above": 99}}}}
SCRIPT = """
    import random
    import numpy as np
    import torch

    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.rng = np.random.default_rng(0)
        def __len__(self):
            return 32
        def __getitem__(self, i):
            return torch.tensor([float(i), {draw}])

    def seed(worker):
        {seed}

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for rows in torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers={workers}, worker_init_fn=seed):
        model(rows).sum().backward()
        optimizer.step()
"""
OWN = "self.rng.normal()"
EACH = "torch.utils.data.get_worker_info().dataset.rng = np.random.default_rng(worker)"
CASES = {
    "the data set's own": (OWN, "pass", 2, [1.0]),
    "numpy, one seed": ("np.random.normal()", "np.random.seed(0)", 2, [1.0]),
    "random, one seed": ("random.random()", "random.seed(0)", 2, [1.0]),
    "torch, one seed": ("torch.rand(()).item()", "torch.manual_seed(0)", 2, [1.0]),
    "its own, a seed for each": (OWN, EACH, 2, [0.0]),
    "numpy": ("np.random.normal()", "pass", 2, [0.0]),
    "nobody draws": ("0.0", "np.random.seed(0)", 2, [0.0]),
    "seeded by the row": ("np.random.default_rng(i).normal()", "pass", 2, [0.0]),
    "one worker": (OWN, "pass", 1, []),
    "no worker": (OWN, "pass", 0, []),
}


@pytest.mark.parametrize("case", CASES)
def test_workers_that_draw_the_same_numbers_are_told(case: str, play: Callable) -> None:
    draw, seed, workers, expected = CASES[case]

    played = play(SCRIPT.format(draw=draw, seed=seed, workers=workers), rules=RULES)

    assert played.samples.get("workers.alike", []) == expected


def test_a_first_draw_after_which_each_worker_has_its_own_numbers_is_none(play: Callable) -> None:
    """Some seed themselves lazily, in the worker, from what they were copied with."""
    draw = (
        "(self.__setattr__('rng', np.random.default_rng([int(self.rng.integers(9)), torch.utils.data.get_worker_info().id]))"
        " or self.rng.normal())"
    )

    assert play(SCRIPT.format(draw=draw, seed="pass", workers=2), rules=RULES).samples["workers.alike"] == [0.0]
