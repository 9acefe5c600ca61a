"""Weights of a sampler that do not do what they were given for."""

from __future__ import annotations

import torch
from driver import Watched
from torch.utils.data import DataLoader, Sampler, TensorDataset, WeightedRandomSampler

from healthcheck.core.events import EventKind
from healthcheck.probes.settings import SamplerProbe

LABELS = (torch.arange(60) % 10 == 0).long()
DATA = TensorDataset(LABELS)


def said(sampler: Sampler[int] | None) -> list[float]:
    loader = DataLoader(DATA, 10, sampler=sampler)
    watched = Watched([SamplerProbe()])
    watched.run.places.note(loader, "train.py:5")
    watched.emit(EventKind.BEFORE_UPDATE, 3)
    return watched.values("sampler.mistaken")


def test_weights_that_change_nothing_or_leave_out_most_rows_are_counted() -> None:
    weights = (1 / torch.bincount(LABELS).float())[LABELS]
    assert said(WeightedRandomSampler(weights.tolist(), 60, replacement=False)) == [1]
    assert said(WeightedRandomSampler([0.1, 0.9], 60, replacement=True)) == [1]


def test_weights_of_each_row_and_draws_of_a_part_are_not() -> None:
    weights = (1 / torch.bincount(LABELS).float())[LABELS]
    assert said(WeightedRandomSampler(weights.tolist(), 60, replacement=True)) == [0]
    assert said(WeightedRandomSampler(weights.tolist(), 20, replacement=False)) == [0]
    assert said(WeightedRandomSampler([1.0] * 60, 60, replacement=False)) == [0]
    assert said(None) == []
