"""Running statistics that one skipped batch has spoilt."""

from __future__ import annotations

import torch
from driver import Loop, Watched
from torch import nn

from healthcheck.probes.weights import RunningStatisticsProbe


def test_a_bad_batch_that_the_loop_skips_stays_in_the_statistics() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model.register_buffer("mask", torch.full((4, 4), float("-inf")))
    watched = Watched([RunningStatisticsProbe()])
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.1))
    loop.run(3, lambda: model(torch.randn(8, 4)).pow(2).mean())
    assert watched.last("buffers.nonfinite") == 0
    model(torch.full((8, 4), float("nan")))
    loop.run(1, lambda: model(torch.randn(8, 4)).pow(2).mean())
    assert watched.last("buffers.nonfinite") == 2
    facts = watched.facts("buffers.nonfinite")
    assert facts["which"] == "1.running_mean, 1.running_var"
    assert facts["buffers"] == "2 of 2 running statistics"


def test_a_model_without_such_layers_says_nothing() -> None:
    model = nn.Linear(4, 1)
    watched = Watched([RunningStatisticsProbe()])
    Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.1)).run(3, lambda: model(torch.randn(8, 4)).mean())
    assert watched.values("buffers.nonfinite") == []
