"""No secret of the command line or the environment reaches the record or the report."""

from __future__ import annotations

import importlib.util
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


CONFIGURATION = """
version: 1
extends: [healthcheck:recommended]
rules:
  ours:
    metric: loss
    when: {above: 0}
    for: 1 of 1
    severity: error
    then: [warn, evidence]
    message: "a rule of ours: {count}, see https://me:S3cr3t@host/x; pwd=S3cr3t"
    hint: "curl https://hooks.slack.com/services/T0/B0/S3cr3t --pass=S3cr3t -H 'Authorization: Bearer S3cr3t'"
    docs: "https://h/x?sig=S3cr3t&y=1"
"""


@pytest.mark.slow
def test_forty_kinds_of_secrets_and_one_in_an_exception_are_in_no_file(
    healthcheck_warm: Callable[..., Any], tmp_path: Path
) -> None:
    known = Path(__file__).resolve().parents[1] / "unit" / "test_redact.py"
    spec = importlib.util.spec_from_file_location("families_of_secrets", known)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "train.py").write_text(
        SCRIPT + "raise RuntimeError('no login: https://h/x?sig=S3cr3t --pass=S3cr3t')\n"
    )
    arguments = [word for family in module.FAMILIES.values() for argv in family for word in argv]
    words = ("TOKEN", "PASSWORD", "PASS", "PIN", "COOKIE", "API_KEY", "SECRET", "PASSPHRASE", "PRIVATE_KEY", "DSN")
    environment = {
        f"{family}_{word}": "S3cr3t" for family in ("NCCL", "CUDA", "TORCH", "SLURM", "DB") for word in words
    }
    environment["HTTP_PROXY"] = "http://u:S3cr3t@h"
    (tmp_path / "rules.yaml").write_text(CONFIGURATION)
    kinds = ("json", "junit", "sarif", "html", "github")
    reports = [f"--report={kind}=out.{kind}" for kind in kinds]
    rules = ("--rules", "rules.yaml")
    done = healthcheck_warm("run", "--observe", *rules, *reports, "train.py", *arguments, env=environment)
    assert done.returncode == 1, done.stderr
    files = [
        p for p in tmp_path.rglob("*") if p.is_file() and p != tmp_path / "train.py" and p != tmp_path / "rules.yaml"
    ]
    assert "a rule of ours: 1, see https://" in (tmp_path / "out.json").read_text()
    assert {f"out.{kind}" for kind in kinds} <= {p.name for p in files}
    assert [p for p in files if b"S3cr3t" in p.read_bytes()] == []
    python = "no login"  # the script's own traceback, which Python prints
    assert [line for line in done.stderr.splitlines() if "S3cr3t" in line and python not in line] == []
