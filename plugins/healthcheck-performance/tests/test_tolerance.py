"""Two replica groups on this machine, over gloo; one is killed, and the other trains on."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from healthcheck import UsageError
from healthcheck_performance import FaultToleranceParameters, start_lighthouse

GROUP = Path(__file__).parent / "tolerant_group.py"
needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="torchft is not installed (make performance)"
)
STEPS, DIES = 40, 15


def started(*words: str) -> subprocess.Popen[str]:
    paths = [str(GROUP.parents[1]), str(GROUP.parents[3]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    return subprocess.Popen(
        [sys.executable, str(GROUP), *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def alone(skipped: list[int]) -> list[list[float]]:
    """The weights of the same training without groups: with equal batches an average over groups changes nothing."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(7)
    data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(STEPS)]
    for number, (x, y) in enumerate(data, start=1):
        if number in skipped:
            continue
        optimizer.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        optimizer.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


@needs_torchft
@pytest.mark.slow
@pytest.mark.distributed
def test_one_group_is_killed_and_the_other_trains_on_and_says_who_was_lost(tmp_path: Path) -> None:
    lighthouse = start_lighthouse(
        FaultToleranceParameters(heartbeat_interval=0.3, min_replica_size=1), "127.0.0.1:0", join_timeout=10.0
    )
    address = lighthouse.address().replace("[::]", "127.0.0.1")
    try:
        survivor = started("survivor", str(tmp_path / "survivor.json"), str(STEPS), address)
        victim = started("victim", str(tmp_path / "victim.json"), str(STEPS), address, str(DIES))
        output, _ = survivor.communicate(timeout=240)
        assert survivor.returncode == 0, output[-3000:]
        victim.communicate(timeout=30)
        assert victim.returncode == -9
    finally:
        for process in (survivor, victim):
            if process.poll() is None:
                process.kill()
        lighthouse.shutdown()
    found: dict[str, Any] = json.loads((tmp_path / "survivor.json").read_text(encoding="utf-8"))
    assert found["errors"] == []
    assert found["sizes"][:3] == [2, 2, 2]
    assert found["sizes"][-1] == 1
    assert len(found["sizes"]) == STEPS
    assert found["lost"] == ["victim"]
    # Each step but those that were lost with the other group is an update, and the weights are those of the data.
    assert found["committed"] == STEPS - found["failures"]
    assert found["failures"] <= 3
    for weights, others in zip(found["weights"], alone(found["skipped"]), strict=True):
        assert weights == pytest.approx(others, rel=1e-4, abs=1e-5)
    alerts = {alert["rule"]: alert for alert in found["alerts"]}
    assert alerts["replica-lost"]["facts"] == {"lost": "victim", "left": "survivor"}
    saved = sorted((tmp_path / "checkpoints").glob("survivor-step-*.pt"))
    assert len(saved) == found["committed"] // 10
    assert set(torch.load(saved[-1], weights_only=True)) == {"model", "optimizer", "torchft"}


def test_a_lighthouse_waits_longer_than_a_heartbeat() -> None:
    for interval in (0.1, 1, 60):
        assert FaultToleranceParameters(heartbeat_interval=interval).heartbeat_timeout > interval


@pytest.mark.skipif(importlib.util.find_spec("torchft") is not None, reason="torchft is installed here")
def test_without_torchft_it_says_what_to_install() -> None:
    with pytest.raises(UsageError, match=r"healthcheck-performance\[fault-tolerance\]"):
        start_lighthouse(FaultToleranceParameters())
