"""Gradients that a DDP wrapper never sees: judged by whether it is called, in two real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[2])
import torch, torch.distributed as dist
from driver import View, Watched
from torch.nn.parallel import DistributedDataParallel
from healthcheck.core.events import EventKind
from healthcheck.probes.step_order import COUNTED_UPDATES, UnsyncedGradientProbe

def work(rank, place):
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    for how in ("inside", "outside"):
        train(how)
    dist.destroy_process_group()

def train(how):
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer, watched = torch.optim.SGD(model.parameters(), lr=0.1), Watched([UnsyncedGradientProbe()])
    for step in range(1, COUNTED_UPDATES + 2):
        (model.module if how == "inside" else model)(torch.ones(2, 2)).sum().backward()
        watched.emit(EventKind.BEFORE_UPDATE, step, model=View(model), optimizer=optimizer)
        optimizer.step()
    assert watched.of("grads.unsynced") == [(COUNTED_UPDATES + 1, 2.0 if how == "inside" else 0.0)], watched.samples
    assert not model._forward_pre_hooks

if __name__ == "__main__":
    torch.multiprocessing.start_processes(work, (sys.argv[1],), nprocs=2, start_method="fork")
"""


def test_a_wrapper_that_is_passed_by_shares_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "meet", Path(__file__).parent],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
