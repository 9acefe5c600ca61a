"""``@healthcheck.metric``: a function of the model becomes a metric, in a watched script and in one that watches itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import healthcheck

LOOP = """
for step in range(20):
    loss = model(torch.ones(1, 2)).sum()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
DECLARED = """
import torch, healthcheck
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
calls = []

@healthcheck.metric("largest_weight", every=5)
def largest_weight(model):
    assert not torch.is_grad_enabled()
    calls.append(1)
    return model.weight.abs().max()
"""
RULES = """
version: 1
external: [largest_weight]
rules:
  weights-grow: {metric: largest_weight, when: {above: 1.5}, severity: error}
"""


def report_of(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "runs" / "latest" / "report.json").read_text()))


@pytest.mark.slow
def test_a_rule_judges_what_the_function_returns_every_so_many_steps(
    healthcheck_warm: Callable, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(DECLARED + LOOP + "print(len(calls), 'calls')\n")
    (tmp_path / "healthcheck.yaml").write_text(RULES)
    done = healthcheck_warm("run", "train.py")
    assert done.returncode == 1, done.stderr
    assert done.stdout == "4 calls\n"
    report = report_of(tmp_path)
    assert report["rules"]["weights-grow"]["samples"] == 4
    assert report["alerts"][0]["fired_step"] % 5 == 0
    assert report["plugin_errors"] == []


@pytest.mark.slow
def test_it_is_not_called_where_no_rule_asks_or_nobody_watches(healthcheck_warm: Callable, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DECLARED + LOOP + "print(len(calls), 'calls')\n")
    (tmp_path / "healthcheck.yaml").write_text("version: 1\nrules: {r: {metric: loss, when: {above: 1.0e+9}}}\n")
    assert healthcheck_warm("run", "train.py").stdout == "0 calls\n"
    assert healthcheck_warm("run", "train.py", env={"HEALTHCHECK": "off"}).stdout == "0 calls\n"


@pytest.mark.slow
def test_a_function_that_raises_is_told_and_training_goes_on(healthcheck_warm: Callable, tmp_path: Path) -> None:
    broken = DECLARED.replace("calls.append(1)", "raise ValueError('no attention here')")
    watch = "with healthcheck.watch(model, optimizer, rules='healthcheck.yaml'):\n"
    (tmp_path / "train.py").write_text(broken + watch + LOOP.replace("\n", "\n    ") + "\nprint('to the end')\n")
    (tmp_path / "healthcheck.yaml").write_text(RULES)
    done = healthcheck_warm("run", "train.py")
    assert done.stdout == "to the end\n"
    assert "no attention here" in done.stderr


def test_a_rhythm_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(healthcheck.UsageError, match="every=0"):
        healthcheck.metric("x", every=0)
