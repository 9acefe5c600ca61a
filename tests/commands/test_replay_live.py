"""A replay of a live run's own record says what the live run said: same rule, step, value, episode."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import math, sys
import torch, healthcheck
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scale = {40: 50.0, 41: 60.0, 42: 40.0, 90: float("nan"), 91: float("nan"), 120: 80.0, 121: 80.0}
for step in range(1, 151):
    x = torch.randn(16, 4)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean() + 1.0
    optimizer.zero_grad()
    (loss * 1.0).backward()
    shown = loss.detach() * scale.get(step, 1.0)
    optimizer.step()
    healthcheck.log(shown=shown, kl=0.01 * step)
    if step % 10 == 0:
        model.eval()
        healthcheck.log(**{"eval.score": 1.0 / step if step != 100 else math.inf})
        model.train()
    if step < 60:
        healthcheck.log(early=1.0)
"""

RULES = """
version: 1
external: [shown, kl, early, eval.score]
metrics: {gap: "shown - ewma(loss, 20)"}
rules:
  shown-nan: {metric: shown, when: nonfinite, severity: error}
  shown-spike: {metric: shown, when: {robust_z: {above: 8, window: 50}}, for: 2 of 5}
  shown-high: {metric: shown, when: {above: 20}, for: 2, recover: {below: 10}}
  gap-high: {metric: gap, when: {above: 10}}
  kl-mean: {metric: kl, when: {mean: {above: 0.5, window: 4}}, every: 10}
  score-low: {metric: eval.score, when: {below: 0.02}, for: 2}
  early-gone: {metric: early, when: {missing: 30}}
  lr-flat: {metric: lr, when: {unchanged: {over: 100}}, severity: info}
  guarded: {metric: grad_norm, when: {above: 0}, only_if: {amp.skipped: 0}, severity: error, warmup: 140}
"""

SAME = ("rule", "severity", "fired_step", "fired_sample", "episode", "value", "score", "normal", "cleared_step", "phase",
        "threshold", "message", "explained_by", "count")  # fmt: skip


def told(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: alert.get(key) for key in SAME} for alert in report["alerts"]]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The record of one real run, and its report."""
    import os
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("live")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "healthcheck.yaml").write_text(RULES)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")} | {"OMP_NUM_THREADS": "1"}
    code = "import sys; from healthcheck.cli import main; sys.exit(main(['run', 'train.py']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=clean, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    report = json.loads((folder / "healthcheck-runs/latest/report.json").read_text())
    return folder, report


pytestmark = pytest.mark.slow  # a real training process


def replayed(run: Callable[..., Any], folder: Path, *more: object) -> dict[str, Any]:
    done = run("replay", "healthcheck-runs/latest", "--format", "json", *more, cwd=folder)
    (report,) = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    return dict(report)


def test_a_replay_of_the_record_gives_the_alerts_of_the_live_run(
    live: tuple[Path, dict[str, Any]], healthcheck_command: Callable[..., Any]
) -> None:
    folder, report = live
    again = replayed(healthcheck_command, folder)
    assert {a["rule"] for a in report["alerts"]} == {
        "shown-nan", "shown-spike", "shown-high", "gap-high", "kl-mean", "score-low", "early-gone", "lr-flat", "guarded"
    }  # fmt: skip
    assert told(again) == told(report)
    assert again["exit_code"] == report["exit_code"] == 1
    assert {r: v["verdict"] for r, v in again["rules"].items()} == {r: v["verdict"] for r, v in report["rules"].items()}
    assert {r: v.get("closest") for r, v in again["rules"].items()} == {
        r: v.get("closest") for r, v in report["rules"].items()
    }


def test_other_rules_over_the_same_record_know_what_the_run_collected(
    live: tuple[Path, dict[str, Any]], healthcheck_command: Callable[..., Any]
) -> None:
    """The live run watched amp.skipped and there was none: a guard on it holds. It never asked for memory."""
    folder, _ = live
    (folder / "other.yaml").write_text(
        "version: 1\nrules:\n"
        "  asked: {metric: grad_norm, when: {above: 0}, only_if: {amp.skipped: 0}, severity: error}\n"
        "  unasked: {metric: grad_norm, when: {above: 0}, only_if: {memory.fraction: {below: 2}}, severity: error}\n"
        "  no-memory: {metric: memory.fraction, when: {missing: 10}}\n"
    )
    report = replayed(healthcheck_command, folder, "--rules", "other.yaml")
    assert {a["rule"]: a["severity"] for a in report["alerts"]} == {"asked": "error", "unasked": "info"}
    assert report["rules"]["no-memory"]["verdict"] == "not judged"


def test_a_thinned_record_says_that_it_is_not_whole(
    live: tuple[Path, dict[str, Any]], healthcheck_command: Callable[..., Any], tmp_path: Path
) -> None:
    from healthcheck.record.lines import Thinner

    folder, _ = live
    copy = tmp_path / "thinned"
    shutil.copytree((folder / "healthcheck-runs/latest").resolve(), copy)
    samples = copy / "samples.jsonl"
    thinner = Thinner(10**6, [40], keep_steps=5)
    samples.write_bytes(thinner.marker(1) + thinner.take(samples.read_bytes()))
    done = healthcheck_command("replay", copy, "--rules", folder / "healthcheck.yaml")
    assert "only a part of the evaluations was kept" in done.stdout
    assert "healthcheck: OK" not in done.stdout
