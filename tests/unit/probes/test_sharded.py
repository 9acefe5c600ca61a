"""Gradients of sharded parameters: the norm of the whole, the same on all ranks. Real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

RANK_SCRIPT = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from healthcheck.probes.gradient_statistics import _reduce, gradient_stats

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
plain = nn.Parameter(torch.zeros(2))
plain.grad = torch.tensor([3.0, 4.0])
params = [plain]
for whole, placement in ((torch.arange(5.0), Shard(0)), (torch.full((4,), 2.0), Replicate())):
    p = nn.Parameter(distribute_tensor(torch.zeros_like(whole), mesh, [placement]))
    p.grad = distribute_tensor(whole, mesh, [placement])
    params.append(p)
stats = gradient_stats(params)
print("norms", [round(n, 6) for n in stats.row("norm")], round(stats.norm, 6), flush=True)
# A vector as the kernel leaves it on each rank (totals; norms, largest, not finite, zeros, all zero of two gradients; what
# stands behind them), whatever that is.
behind = [7.0, 8.0, 9.0, 10.0]
rows = [3.0, 1.0, 3.0, 1.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0] if dist.get_rank() else [4.0, 1.0, 4.0, 1.0, 1.0, 0.0, 2.0, 0.0, 0.0, 0.0]
vector = torch.tensor([0.0] * 5 + rows + behind, dtype=torch.float64)
_reduce(vector, 5, [((mesh, (Shard(0),)), [0, 1])])
print("reduced", [round(n, 6) for n in vector.tolist()], flush=True)
dist.barrier()
# Not an ordinary end: after collectives on a mesh one process in twenty is aborted while the interpreter shuts down
# ("terminate called without an active exception"), by torch 2.13 over gloo, with nothing of ours imported.
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_shards_add_up_and_replicas_count_once(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK_SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = Path(__file__).parents[3]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    common["PYTHONPATH"] = str(root)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [process.communicate(timeout=600) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], results
    # 5, sqrt(0 + 1 + 4 + 9 + 16), 4; together sqrt(25 + 30 + 16)
    totals, norms, largest, nonfinite, zeros = (
        [5.196152, 4.0, 2.0, 4.0, 0.0],
        [5.0, 1.414214],
        [4.0, 1.0],
        [1.0, 1.0],
        [4.0, 0.0],
    )
    reduced = [*totals, *norms, *largest, *nonfinite, *zeros, 0.0, 0.0, 7.0, 8.0, 9.0, 10.0]
    expected = f"norms [5.0, 5.477226, 4.0] 8.42615\nreduced {reduced}"
    assert [out.strip() for out, _ in results] == [expected, expected]
