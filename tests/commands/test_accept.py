"""Known alerts: accept them once with a reason, and only new ones fail."""

from __future__ import annotations

import json

import pytest

SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for step in range(12):
    x = torch.randn(8, 4)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
RULES = """
version: 1
rules:
  lr-high: {metric: lr, when: {above: 0.5}, severity: error}
  loss-high: {metric: loss, when: {above: 1.0e+3}, severity: error}
"""


@pytest.mark.slow
def test_an_accepted_alert_is_shown_and_does_not_fail_a_new_one_does_and_a_mended_one_is_named(
    healthcheck_warm, healthcheck_here, tmp_path
):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "healthcheck.yaml").write_text(RULES)
    assert healthcheck_warm("run", "train.py", 0.6).returncode == 1

    done = healthcheck_here("accept", "latest", "--reason", "warm start, agreed on Monday")
    assert done.returncode == 0, done.stderr
    assert "accepted lr-high on lr in train.py" in done.stdout
    again = healthcheck_here("accept", "--reason", "twice")
    assert "nothing new" in again.stdout

    known = healthcheck_warm("run", "train.py", 0.6)
    assert known.returncode == 0, known.stderr
    assert "warm start, agreed on Monday" in known.stderr
    report = json.loads((tmp_path / "runs/latest/report.json").read_text())
    assert report["alerts"][0]["accepted"] == "warm start, agreed on Monday"

    assert healthcheck_warm("run", "train.py", 60).returncode == 1  # loss-high is new
    fixed = healthcheck_warm("run", "train.py", 0.1)
    assert fixed.returncode == 0
    assert "accepted, but nothing needed it: lr-high" in fixed.stderr


@pytest.mark.slow
def test_an_alert_that_stopped_the_run_is_accepted_only_by_force(healthcheck_warm, healthcheck_here, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "healthcheck.yaml").write_text(RULES.replace("severity: error}", "severity: error, then: [stop]}", 1))
    assert healthcheck_warm("run", "train.py", 0.6).returncode == 1
    refused = healthcheck_here("accept", "--reason", "x")
    assert refused.returncode == 4
    assert "lr-high stopped this run" in refused.stderr
    assert not (tmp_path / "healthcheck-accepted.yaml").exists()


def test_a_broken_file_is_an_error_with_its_place_before_anything_runs(healthcheck_here, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "healthcheck-accepted.yaml").write_text("version: 1\naccepted:\n  - {rule: lr-high, reson: x}\n")
    result = healthcheck_here("run", "train.py", 0.1)
    assert result.returncode == 4
    assert 'healthcheck-accepted.yaml:3:21: error[unknown-key]: unknown key "reson"' in result.stderr
