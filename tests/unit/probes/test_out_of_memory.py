"""Memory that ran out: real errors of the host's allocator, and a device that says how much it held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from driver import View

from healthcheck.core.events import Event, EventKind
from healthcheck.probes.memory_readings import cgroup_memory, limited_cgroups
from healthcheck.probes.out_of_memory import OutOfMemoryProbe, kept_by_layer, ran_out


class Device:
    """What a card says; there is none here."""

    kind = "cuda"

    def __init__(self, allocated: int, reserved: int, capacity: int) -> None:
        self._numbers = allocated, reserved, capacity

    def statistics(self) -> dict[str, int]:
        return {"allocated": self._numbers[0], "reserved": self._numbers[1]}

    def capacity_bytes(self) -> int:
        return self._numbers[2]


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(32, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


def report(device: Any, error: BaseException) -> dict[str, Any]:
    model, optimizer = trained()
    probe = OutOfMemoryProbe(device)
    view = View(model, [optimizer])
    probe.sample(Event(EventKind.TRAIN_START, 1, model=view), None)  # type: ignore[arg-type]
    loss = model(torch.randn(32, 64)).square().mean()
    probe.sample(Event(EventKind.LOSS, 2, model=view, loss=loss, loss_graph=loss.grad_fn), None)  # type: ignore[arg-type]
    found = list(probe.sample(Event(EventKind.EXCEPTION, 9, exception=error), None))  # type: ignore[arg-type]
    if not found:
        return {}
    assert found[0].detail is not None
    return {"metric": found[0].metric, **found[0].detail()}


def caught() -> BaseException:
    try:
        torch.empty(1 << 52)
    except RuntimeError as error:
        return error
    raise AssertionError


CARD = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is free."
)


def test_the_host_that_gives_no_more_is_named_with_the_line_that_asked() -> None:
    said = report(None, caught())
    assert said["metric"] == "oom.host"
    assert said["where"].startswith("test_out_of_memory.py:")
    assert "optimizer state" in said["holders"]


def test_on_a_card_the_largest_holder_decides_what_is_tried() -> None:
    gib = 2**30
    assert report(Device(70 * gib, 72 * gib, 80 * gib), CARD)["metric"] == "oom.activations"
    assert report(Device(200_000, 200_000, 80 * gib), CARD)["metric"] == "oom.state"
    assert report(Device(40 * gib, 78 * gib, 80 * gib), CARD)["metric"] == "oom.fragmentation"


def test_what_was_asked_for_and_which_layers_keep_most_is_said() -> None:
    said = report(Device(2**36, 2**36, 2**37), CARD)
    assert said["asked"] == "for 2.00 GiB more"
    assert "at step 2, most by" in said["kept for backward"]


def test_the_graph_is_walked_once_also_where_several_optimizers_step_and_nobody_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walked: list[Any] = []
    monkeypatch.setattr(
        "healthcheck.probes.out_of_memory.kept_by_layer", lambda *given: walked.append(given) or ({}, 0)
    )
    model, _ = trained()
    probe = OutOfMemoryProbe(Device(1, 1, 1))
    for step in range(1, 30):
        graph = model(torch.randn(4, 64)).sum().grad_fn
        probe.sample(Event(EventKind.LOSS, step, loss_graph=graph, model=View(model)), None)  # type: ignore[arg-type]
    assert len(walked) == 1


def test_memory_is_read_every_tenth_step_also_where_no_rows_are_noted() -> None:
    model, _ = trained()
    probe = OutOfMemoryProbe(Device(1, 1, 1))
    called = []
    for step in range(1, 60):
        if probe.rests_until > step:
            continue
        called.append(step)
        graph = model(torch.randn(4, 64)).sum().grad_fn
        probe.sample(Event(EventKind.LOSS, step, loss_graph=graph, model=View(model)), None)  # type: ignore[arg-type]
        probe.sample(Event(EventKind.STEP_END, step), None)  # type: ignore[arg-type]
    assert [step for step, _ in probe._readings] == [1, 10, 20, 30, 40, 50]
    assert called == [1, 2, 10, 20, 30, 40, 50]


def test_an_error_that_is_not_about_memory_makes_no_report() -> None:
    assert report(Device(1, 1, 1), ValueError("shape mismatch")) == {}
    assert not ran_out(RuntimeError("CUDA error: device-side assert triggered"))


def test_layers_are_charged_with_what_their_backward_pass_keeps() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Tanh(), torch.nn.Linear(256, 4))
    loss = model(torch.randn(100, 16)).square().mean()
    layers, total = kept_by_layer(loss.grad_fn, View(model))
    sizes = dict(layers)
    assert sizes["0"] >= 100 * 256 * 4  # the output of tanh, which both tanh and the next layer keep
    assert sum(sizes.values()) == total
    assert total < 2 * (100 * 256 + 100 * 16 + 100 * 4) * 4


@pytest.mark.parametrize("version", ["v2", "v1"])
def test_memory_of_a_cgroup_is_that_of_all_its_processes_without_idle_cache(version: str, tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    if version == "v2":
        folder, names = tmp_path / "fs/job", ("memory.max", "memory.current", "inactive_file")
        proc.write_text("0::/job/rank0\n")
    else:
        folder, names = (
            tmp_path / "fs/memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        )
        proc.write_text("4:memory:/job/rank0\n")
    (folder / "rank0").mkdir(parents=True)
    (folder / names[0]).write_text("1000\n")
    (folder / names[1]).write_text("970\n")
    (folder / "memory.stat").write_text(f"anon 500\n{names[2]} 250\nfile 300\n")
    assert cgroup_memory(limited_cgroups(tmp_path / "fs", proc)) == (720, 1000)


def test_without_a_limit_there_is_no_cgroup_memory(tmp_path: Path) -> None:
    (tmp_path / "fs").mkdir()
    (tmp_path / "fs/memory.max").write_text("max\n")
    (tmp_path / "fs/memory.current").write_text("970\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    assert limited_cgroups(tmp_path / "fs", tmp_path / "cgroup") == []
