"""The path that values take on an accelerator, walked on the CPU: nobody may read a tensor.

Whether a tensor may be read is always answered no here, and every read that happens all the same (``.item()``,
``float()``, ``bool()``) is an error.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driver import Everything, View
from standin import NoReads, elsewhere
from torch import nn

from healthcheck.core.events import Event, EventKind
from healthcheck.core.samples import Sample
from healthcheck.device.deferred import Deferred, number, value_of
from healthcheck.probes import PROBES

# Their numbers do not come from the device.
HOST_ONLY = {"memory", "host-memory", "live-tensors", "memory-forecast", "compilation"}


@pytest.fixture
def as_if_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(monkeypatch)


@pytest.mark.parametrize("read", [float, bool, torch.Tensor.item], ids=["float", "bool", "item"])
def test_the_guard_of_this_test_sees_reads(read: Any) -> None:
    with pytest.raises(AssertionError, match="waits for the device"), NoReads():
        read(torch.ones(()))


def test_no_probe_reads_a_device_value_on_the_step_path(as_if_on_a_device: None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    view, demand = View(model, [optimizer]), Everything()
    probes = [p for p in (kind() for kind in PROBES) if p.name not in HOST_ONLY]
    samples: list[Sample] = []
    for probe in probes:
        getattr(probe, "plan", lambda demand: None)(demand)

    def emit(kind: EventKind, step: int, **facts: Any) -> None:
        event = Event(kind, step, model=view, **facts)
        with NoReads():
            for probe in probes:
                if kind in probe.listens_to:
                    samples.extend(probe.sample(event, demand))

    for step in range(1, 31):
        x = torch.randn(16, 8).bfloat16()
        emit(EventKind.STEP_START, step)
        emit(EventKind.BATCH_READY, step, batch={"x": x, "labels": torch.tensor([1, -100])}, n_samples=16)
        loss = model(x).float().pow(2).mean()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        emit(EventKind.LOSS, step, loss=loss.detach())
        loss.backward()
        emit(EventKind.BACKWARD_END, step)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        known = {"optimizer": optimizer, "grad_norm": norm, "max_norm": 0.01, "loss_scale": torch.tensor(4.0)}
        emit(EventKind.BEFORE_UPDATE, step, **known)
        optimizer.step()
        emit(EventKind.AFTER_UPDATE, step, **known)
        emit(EventKind.STEP_END, step, skipped=False, **known)

    seen = {s.metric for s in samples}
    late = {s.metric for s in samples if isinstance(number(s.value), Deferred)}
    assert {
        "loss", "loss.best", "grad_norm", "grad_nonfinite", "grads.zero", "grad.layer_ratio", "clip.applied",
        "update_ratio", "updates.lost", "params.unmoved", "grads.leftover", "params.nonfinite", "units.dead",
        "batch.nonfinite", "amp.scale",
    } <= late  # fmt: skip
    assert {"lr", "modules.in_eval", "params.no_gradient", "micro_batches", "params.tied_lost"} <= seen - late
    numbers = {s.metric: value_of(number(s.value)) for s in samples}
    assert numbers["loss.best"] <= numbers["loss"]
    assert numbers["grads.leftover"] == 0
    assert numbers["grad_nonfinite"] == 0
    assert numbers["clip.applied"] == 1
    for probe in probes:
        getattr(probe, "close", lambda: None)()
