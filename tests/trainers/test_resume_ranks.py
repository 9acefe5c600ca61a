"""A plain script on two ranks goes on from its checkpoint on both: same step, each with its own detectors."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TRAIN = """
    import sys, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("gloo")
    rank, (last, resume, loads) = dist.get_rank(), sys.argv[1:]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    begin = torch.zeros(1, dtype=torch.long)
    if resume != "-" and (rank == 0 or loads == "all"):
        saved = torch.load(resume)
        model.load_state_dict(saved["model"])
        begin += saved["step"]
    dist.broadcast(begin, 0)
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    model = DDP(model)
    for i in range(int(begin) + 1, int(last) + 1):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * i + rank))
        if rank == 1 and i in (15, 23):
            x = x * 100  # on one rank only
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if i == 20 and rank == 0:
            torch.save({"model": model.module.state_dict(), "step": i}, "c20.pt")
    dist.destroy_process_group()
"""
RULES: dict[str, Any] = {"spike": {"metric": "loss", "when": {"robust_z": {"above": 30, "window": 40}}, "warmup": 10}}


def launch(folder: Path, *argv: str) -> list[subprocess.CompletedProcess[str]]:
    """Both ranks, as a launcher starts them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")}
    clean |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "healthcheck", "run", "--fail-on", "never", "train.py", *argv],
            env=clean | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=600) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [subprocess.CompletedProcess([], p.returncode, *texts) for p, texts in zip(ranks, said, strict=True)]


def test_both_ranks_go_on_at_the_same_step_with_their_own_windows_whoever_loads_the_file(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    (tmp_path / "healthcheck.yaml").write_text(json.dumps({"version": 1, "rules": RULES}))
    first = launch(tmp_path, "22", "-", "all")
    assert [p.returncode for p in first] == [0, 0], first[0].stderr + first[1].stderr
    record = tmp_path / "healthcheck-runs" / "latest"
    kept = [json.loads((record / "checkpoints" / place / "step-20.json").read_text()) for place in ("", "rank-1")]
    assert kept[0]["normal"]["loss"] != kept[1]["normal"]["loss"]  # each rank's own

    for loads in ("all", "rank 0"):
        again = launch(tmp_path, "30", "c20.pt", loads)

        assert [p.returncode for p in again] == [0, 0], again[0].stderr + again[1].stderr
        assert "continues " in again[0].stderr
        assert "1 goes on after step 20 with their windows" in again[0].stderr
        assert "do not agree" not in again[0].stderr
        assert json.loads((record / "report.json").read_text())["resumed_from"] == 20
        other = json.loads((record / "rank-1" / "report.json").read_text())
        assert (other["resumed_from"], other["steps"]) == (20, 30)
        # Fresh, the rule would still be warming up.
        assert [(a["rule"], a["fired_step"]) for a in other["alerts"]] == [("spike", 23)]
