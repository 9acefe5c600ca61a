"""Memory: real readings of this process, limits of containers, and the forecast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from driver import Watched

from healthcheck.core.events import EventKind
from healthcheck.probes.memory import (
    FLOOR_STEPS,
    NO_END,
    HostMemoryProbe,
    LiveTensorProbe,
    MemoryForecastProbe,
    MemoryProbe,
)
from healthcheck.probes.memory_readings import TorchDevice, memory_limit_bytes, open_files, physical_bytes

MIB = 2**20


class Card(TorchDevice):
    """A device whose allocator says what the test wants."""

    def __init__(self, capacity: int = 1000 * MIB, **stats: int) -> None:
        super().__init__()
        self.stats, self.capacity = stats, capacity

    def statistics(self) -> dict[str, int]:
        return self.stats

    def capacity_bytes(self) -> int:
        return self.capacity


# In a process of its own: one that has run other tests has memory to spare, and hands some back when it likes.
GROWTH = """
import json, torch
from driver import Watched
from healthcheck.core.events import EventKind
from healthcheck.probes.memory import HostMemoryProbe, MemoryProbe
watched = Watched([HostMemoryProbe(), MemoryProbe()])
watched.emit(EventKind.STEP_END, 1)
kept = torch.ones(64 * 2**20 // 4)
watched.emit(EventKind.STEP_END, 2)
names = ("memory.host", "memory.allocated", "memory.fraction", "memory.peak")
print(json.dumps({name: watched.values(name) for name in names}))
"""


@pytest.mark.slow
def test_growth_of_this_process_is_seen() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    read: dict[str, list[float]] = json.loads(done.stdout)
    for name in ("memory.host", "memory.allocated"):
        before, after = read[name]
        assert 60 * MIB < after - before < 80 * MIB
    assert 0 < read["memory.fraction"][-1] <= 1
    assert read["memory.peak"][-1] >= read["memory.allocated"][-1] * 0.9


def test_the_cpu_has_no_cache_to_speak_of() -> None:
    if TorchDevice().kind != "cpu":
        pytest.skip("an accelerator is in use")
    watched = Watched([MemoryProbe()])
    watched.emit(EventKind.STEP_END, 1)
    assert not watched.names() & {"memory.reserved", "memory.fragmentation", "memory.retries"}


def test_a_card_with_a_cache() -> None:
    watched = Watched([MemoryProbe(Card(allocated=300 * MIB, reserved=500 * MIB, peak=450 * MIB, retries=2))])
    watched.emit(EventKind.STEP_END, 1)
    assert watched.last("memory.fragmentation") == pytest.approx(0.4)
    assert watched.last("memory.fraction") == 0.5
    assert watched.last("memory.retries") == 2


def test_the_floor_of_an_epoch_is_its_lowest_step() -> None:
    card = Card(allocated=0)
    watched = Watched([MemoryProbe(card)])
    for epoch in range(2):
        watched.emit(EventKind.EPOCH_START, epoch * 3 + 1)
        for n, used in enumerate((9, 5, 7)):
            card.stats["allocated"] = (used + epoch) * MIB
            watched.emit(EventKind.STEP_END, epoch * 3 + n + 1)
        watched.emit(EventKind.EPOCH_END, epoch * 3 + 3)
    assert watched.values("memory.epoch_floor") == [5 * MIB, 6 * MIB]


def test_without_epochs_the_floor_is_that_of_a_stretch_of_steps() -> None:
    watched = Watched([MemoryProbe(Card(allocated=4 * MIB))])
    for step in range(1, 2 * FLOOR_STEPS + 1):
        watched.emit(EventKind.STEP_END, step)
    assert [step for step, _ in watched.of("memory.epoch_floor")] == [FLOOR_STEPS, 2 * FLOOR_STEPS]


def test_host_fraction_is_against_the_limit() -> None:
    watched = Watched([HostMemoryProbe(lambda: 25, lambda: 100)])
    watched.emit(EventKind.STEP_END, 1)
    assert watched.last("memory.host_fraction") == 0.25


def test_live_tensors_are_counted() -> None:
    watched = Watched([LiveTensorProbe()])
    watched.emit(EventKind.STEP_END, 1)
    kept = [torch.zeros(1) for _ in range(50)]
    watched.emit(EventKind.STEP_END, 2)
    before, after = watched.values("memory.live_tensors")
    assert after - before == len(kept)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/job/step\n", {"job/memory.max": "3000\n", "job/step/memory.max": "max\n"}, 3000),
        ("0::/\n", {"memory.max": "4096\n"}, 4096),
        ("0::/elsewhere\n", {"memory.max": "5000\n"}, 5000),
        ("3:cpu:/x\n9:memory:/docker/a\n", {"memory/docker/a/memory.limit_in_bytes": "7000\n"}, 7000),
    ],
)
def test_cgroup_limits(tmp_path: Path, own: str, files: dict[str, str], limit: int) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text(own)
    assert memory_limit_bytes(tree(tmp_path / "fs", files), proc) == limit


@pytest.mark.parametrize("text", ["max\n", "9223372036854771712\n"])
def test_no_cgroup_limit_means_the_memory_of_the_machine(tmp_path: Path, text: str) -> None:
    root = tree(tmp_path, {"memory.max": text, "memory/memory.limit_in_bytes": text})
    assert memory_limit_bytes(root, tmp_path / "nothing") == physical_bytes()


def forecast(levels: list[int], capacity: int) -> Watched:
    """Steps of two seconds each that leave these amounts allocated."""
    card, now = Card(capacity=capacity, allocated=1), [0.0]
    watched = Watched([MemoryForecastProbe(card, lambda: now[0])])
    for step, used in enumerate(levels, start=1):
        card.stats["allocated"] = used
        now[0] = step * 2.0
        watched.emit(EventKind.STEP_END, step)
    return watched


def test_steady_growth_has_an_end() -> None:
    """1 MiB a step, a step every 2 s: what is left of 1,000 MiB lasts 2 s a MiB."""
    watched = forecast([step * MIB for step in range(1, 201)], capacity=1000 * MIB)
    step, left = watched.of("memory.time_left")[-1]
    assert step > 190
    assert left == pytest.approx((1000 - step) * 2.0)
    assert watched.facts("memory.time_left")["growth"].startswith("1.00 MiB a step since step ")


@pytest.mark.parametrize(
    "levels",
    [
        [100 * MIB] * 200,
        [100 * MIB + (step % 7) * MIB for step in range(200)],
        [min(step, 40) * MIB for step in range(1, 301)],
        [300 * MIB + step * 8192 for step in range(1, 301)],
    ],
    ids=["flat", "varying lengths", "warm-up only", "creeping caches"],
)
def test_what_does_not_grow_has_no_end(levels: list[int]) -> None:
    watched = forecast(levels, capacity=1000 * MIB)
    assert watched.last("memory.time_left") == NO_END


@pytest.mark.skipif(open_files() is None, reason="the system does not list open files")
def test_open_files_are_counted(tmp_path: Path) -> None:
    watched = Watched([HostMemoryProbe()])
    watched.emit(EventKind.STEP_END, 1)
    kept = [(tmp_path / str(n)).open("w") for n in range(10)]
    watched.emit(EventKind.STEP_END, 2)
    for file in kept:
        file.close()
    before, after = watched.values("host.open_files")
    assert after - before == 10
