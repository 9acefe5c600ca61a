"""``healthcheck doctor train.py``: real processes, with and without us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from healthcheck.cli import doctor
from healthcheck.cli.doctor import Trial, compare

SCRIPT = """
import sys
import torch

torch.manual_seed(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
if "--unseeded" in sys.argv:
    torch.seed()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(1000):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "same", "runs"), [(["3"], True, 6), (["3", "--unseeded"], None, 3)])
def test_losses_are_compared_and_memory_and_time_reported(
    healthcheck_here: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    same: bool | None,
    runs: int,
) -> None:
    assert len(doctor.ORDER) == 6
    monkeypatch.setattr(doctor, "ORDER", doctor.ORDER[-runs:])
    (tmp_path / "train.py").write_text(SCRIPT)
    done = healthcheck_here("doctor", "--format", "json", "--steps", "8", "train.py", *arguments)
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)["measured"]
    assert measured["steps"] == 8
    assert measured["ratio"] > 0
    assert measured["cpu_ratio"] > 0
    assert f"run {runs} of {runs}, with healthcheck: 8 steps" in done.stderr
    assert measured["host_memory"]["watched"] > 0
    assert measured["identical_losses"] is same


def trial(mode: str, wall: float, cpu: float, **memory: int) -> Trial:
    return Trial(mode, 30, wall, ("1.0",), {"host": 1, **memory}, cpu)


def test_on_a_busy_machine_processor_time_is_told_and_the_clock_named_as_unreliable() -> None:
    busy = [trial("bare", 0.1, 0.1), trial("watched", 0.3, 0.102), trial("bare", 0.2, 0.1)]
    measured, findings = compare(busy)
    (time,) = (f for f in findings if f.topic == "step time")
    assert time.level == "ok"
    assert "of processor time a step without healthcheck" in time.text
    assert "1.020 times" in time.text
    assert measured["ratio"] == pytest.approx(2.0)


def test_on_a_busy_machine_with_a_device_nothing_is_claimed() -> None:
    busy = [trial("bare", 0.1, 0.1, device=1), trial("watched", 0.3, 0.1, device=1), trial("bare", 0.2, 0.1, device=1)]
    (time,) = (f for f in compare(busy)[1] if f.topic == "step time")
    assert time.level == "note"
    assert "this says little" in time.text


def test_a_launcher_is_answered_with_the_line_that_works(healthcheck_command: Any) -> None:
    done = healthcheck_command("doctor", "torchrun", "--nproc-per-node", "2", "train.py")
    assert done.returncode == 4
    assert "healthcheck doctor train.py" in done.stderr


@pytest.mark.slow
def test_a_script_without_an_optimizer_step_is_a_problem_after_one_run(
    healthcheck_command: Any, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    done = healthcheck_command("doctor", "train.py")
    assert done.returncode == 1
    assert "no step of a torch optimizer was seen in the whole script" in done.stdout
    assert "run 2 of 6" not in done.stderr


@pytest.mark.slow
def test_a_script_that_is_not_there_or_does_not_run_is_a_usage_error(healthcheck_command: Any, tmp_path: Path) -> None:
    missing = healthcheck_command("doctor", "nowhere.py")
    assert missing.returncode == 4
    assert "no such script: nowhere.py" in missing.stderr
    (tmp_path / "broken.py").write_text("raise KeyError('data')\n")
    broken = healthcheck_command("doctor", "broken.py")
    assert broken.returncode == 4
    assert "did not run on its own" in broken.stderr
    assert "KeyError: 'data'" in broken.stderr
