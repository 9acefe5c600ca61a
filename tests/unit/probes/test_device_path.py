"""The path that values take on an accelerator, walked on the CPU: nobody may read a tensor.

Probes ask :func:`on_host` whether a value may be read. Here it always says no, and every read that
happens all the same (``.item()``, ``float()``, ``bool()``) is an error.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from driver import Everything, View
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from healthcheck.events import Event, EventKind
from healthcheck.probes import PROBES
from healthcheck.probes.transfer.late import Element, Late
from healthcheck.probes.transfer.mailbox import read_now
from healthcheck.samples import Sample

# Their numbers do not come from the device.
HOST_ONLY = {"memory", "host-memory", "live-tensors", "memory-forecast", "compilation"}


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if "_local_scalar_dense" in name or "is_nonzero" in name or "nonzero" in name:
            raise AssertionError(f"a probe waits for the device: {name}")
        return function(*args, **(kwargs or {}))


@pytest.fixture
def as_if_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def scalar(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().reshape(()) if value.numel() == 1 else None
        return float(value) if isinstance(value, (int, float)) else None

    for name, module in list(sys.modules.items()):
        if name.startswith("healthcheck.probes."):
            if hasattr(module, "on_host"):
                monkeypatch.setattr(module, "on_host", lambda v: not isinstance(v, torch.Tensor))
            if hasattr(module, "scalar"):
                monkeypatch.setattr(module, "scalar", scalar)


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
    late = {s.metric for s in samples if isinstance(s.value, (torch.Tensor, Late, Element))}
    assert {
        "loss", "loss.best", "grad_norm", "grad_nonfinite", "grads.zero", "grad.layer_ratio", "clip.applied",
        "update_ratio", "updates.lost", "params.unmoved", "grads.leftover", "params.nonfinite", "units.dead",
        "batch.nonfinite", "amp.scale",
    } <= late  # fmt: skip
    assert {"lr", "modules.in_eval", "params.no_gradient", "micro_batches", "params.tied_lost"} <= seen - late
    assert all(s.value.dim() == 0 for s in samples if isinstance(s.value, torch.Tensor))
    with torch.no_grad():
        numbers = {s.metric: s.value for s in samples if read_now(s)}
    assert numbers["loss.best"] <= numbers["loss"]
    assert numbers["grads.leftover"] == 0
    assert numbers["grad_nonfinite"] == 0
    assert numbers["clip.applied"] == 1
    for probe in probes:
        getattr(probe, "close", lambda: None)()
