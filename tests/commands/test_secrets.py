"""No secret of the command line or the environment reaches the record or the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3):
    x = torch.full((4, 2), float("nan") if i == 2 else 1.0)
    model(x).mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.slow
def test_fake_tokens_are_nowhere_in_the_run_folder(healthcheck_warm: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = [
        "--api-key",
        "SECRET-1",
        "--hub_token=SECRET-2",
        "--store",
        "https://me:SECRET-3@host/x",
        "Bearer SECRET-4",
    ]
    environment = {"WANDB_API_KEY": "SECRET-5", "NCCL_TOKEN": "SECRET-6", "MY_PASSWORD": "SECRET-7"}
    done = healthcheck_warm("run", "--report", "json=report.json", "train.py", *arguments, env=environment)
    assert done.returncode == 1, done.stderr
    files = [p for p in [*(tmp_path / "runs").rglob("*"), tmp_path / "report.json"] if p.is_file()]
    assert any(p.name == "environment.json" for p in files), "evidence was written"
    assert [p for p in files if b"SECRET" in p.read_bytes()] == []
    assert "SECRET" not in done.stderr
