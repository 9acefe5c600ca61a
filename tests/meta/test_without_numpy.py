"""torch does not require numpy, and neither do we: what is watched is watched without it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
rows = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.arange(64.0))
for _ in range(3):
    for x, y in torch.utils.data.DataLoader(rows, batch_size=8):
        loss = (model(x).squeeze(1) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
WATCH = """
import sys
sys.modules["numpy"] = None
from healthcheck.cli import main
sys.exit(main(["run", "--rules", "healthcheck:strict", "--fail-on", "never", "--report", "json=report.json", "train.py"]))
"""


def test_no_module_needs_numpy() -> None:
    """It may be asked whether a script has imported it: ``sys.modules.get("numpy")``."""
    needs = re.compile(r"^\s*(import numpy|from numpy)|[\w)]\.numpy\(\)(?!``)", re.MULTILINE)
    found = [path for path in (ROOT / "healthcheck").rglob("*.py") if needs.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_no_test_needs_numpy() -> None:
    """``make check`` has nothing but the requirements and the extra ``dev``."""
    needs = re.compile(r"^(import numpy|from numpy)", re.MULTILINE)
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if needs.search(path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.slow
def test_a_training_is_watched_by_all_rules_without_numpy(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")}
    env |= {"HEALTHCHECK_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", WATCH], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["plugin_errors"] == []
    assert report["rules"]["repeated-data"]["causes"]["same-batch"]["verdict"] != "not judged"
