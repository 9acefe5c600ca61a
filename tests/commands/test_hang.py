"""A run that hangs: it is said where, from a thread, while the main thread cannot say anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healthcheck.run import watchdog

Run = Callable[..., Any]

pytestmark = pytest.mark.slow

SCRIPT = """
import os, pathlib, threading, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.randn(8, 4)).pow(2).mean().backward(); optimizer.step(); optimizer.zero_grad()
def stuck():
    over.wait(PATIENCE)
def look():
    runs = pathlib.Path(os.environ["HEALTHCHECK_RUNS"])
    while not any("hang" in file.read_text() for file in runs.glob("*/alerts.jsonl")):
        time.sleep(0.1)
    time.sleep(LONGER)
    over.set()
over = threading.Event()
for i in range(5):
    step()
threading.Thread(target=look, daemon=True).start()
stuck()
step()
print("finished")
"""

RULES = """
version: 1
rules:
  hang:
    metric: heartbeat
    when: {stale: {after: 3s, first: 120s}}
    severity: error
    then: [dump_stacks, THEN]
"""


def write(folder: Path, then: str, *, longer: float = 0) -> None:
    """A script that hangs until this is noticed, and then ``longer`` seconds more."""
    (folder / "train.py").write_text(SCRIPT.replace("LONGER", str(longer)).replace("PATIENCE", str(120 + longer)))
    (folder / "healthcheck.yaml").write_text(RULES.replace("THEN", then))


def test_a_hang_is_reported_with_the_line_and_nothing_is_killed(healthcheck_warm: Run, tmp_path: Path) -> None:
    write(tmp_path, "warn")
    done = healthcheck_warm("run", "--report", "json=report.json", "train.py")
    assert "finished" in done.stdout
    assert "ERROR hang  step 5" in done.stderr
    assert "train.py:8 in stuck" in done.stderr
    assert done.returncode == 1
    (alert,) = json.loads((tmp_path / "report.json").read_text())["alerts"]
    assert alert["rule"] == "hang"
    assert Path(alert["actions"][0]["path"]).read_text().count("train.py") >= 1


def test_abort_ends_the_process_with_the_code_of_the_rule_and_a_report(healthcheck_warm: Run, tmp_path: Path) -> None:
    write(tmp_path, "{stop: {mode: abort, exit_code: 17}}", longer=300)
    done = healthcheck_warm("run", "--report", "json=report.json", "train.py")
    assert done.returncode == 17
    assert "finished" not in done.stdout
    assert "STOPPED at step 5 by hang" in done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["exit_code"] == 17


def test_observe_mode_does_not_end_a_hang(healthcheck_warm: Run, tmp_path: Path) -> None:
    write(tmp_path, "{stop: {mode: abort, exit_code: 17}}", longer=watchdog.GRACE + 2 * watchdog.TICK)
    done = healthcheck_warm("run", "--observe", "train.py")
    assert "finished" in done.stdout
    assert done.returncode == 0
    assert "would have stopped" in done.stderr


SLOW = """
import io, time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(torch.randn(8, 4)).pow(2).mean().backward(); optimizer.step(); optimizer.zero_grad()
def evaluate_on_disk():
    time.sleep(5)
class Slow(io.BytesIO):
    def write(self, data):
        time.sleep(5 if not self.tell() else 0)
        return super().write(data)
def backend(graph, inputs):
    time.sleep(5)
    return graph.forward
for i in range(5):
    step()
evaluate_on_disk()
step()
torch.save(model.state_dict(), Slow())
step()
torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
step()
print("finished")
"""


def test_a_slow_evaluation_checkpoint_or_compiler_is_not_a_hang(healthcheck_warm: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW)
    rules = RULES.replace("THEN", "{stop: {mode: abort, exit_code: 75}}")
    (tmp_path / "healthcheck.yaml").write_text(rules)
    done = healthcheck_warm("run", "--report", "json=report.json", "train.py")
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["alerts"] == []
