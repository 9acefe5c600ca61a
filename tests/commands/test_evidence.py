"""``healthcheck evidence``: what a real alert kept is read back, and the printed lines load it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import healthcheck
from healthcheck.cli import main

RULES: dict[str, Any] = {
    "version": 1,
    "rules": {
        "loss-not-finite": {
            "metric": "loss",
            "when": "nonfinite",
            "severity": "error",
            "then": ["evidence"],
            "hint": "look at the batch",
        },
        "grads-high": {"metric": "grad_norm", "when": {"above": 1e9}, "then": ["warn"]},
    },
}


@pytest.fixture
def kept(here: Path) -> Path:
    """A loop whose eighth loss is NaN; returns the folder of the run."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with healthcheck.watch(model, optimizer, rules=RULES, name="toy", console=False) as health:
        for step in range(1, 9):
            loss = model(torch.randn(5, 3)).square().mean() * (float("nan") if step == 8 else 1.0)
            optimizer.zero_grad()
            loss.backward()
            health.step(loss=loss)
            optimizer.step()
    return (here / "latest").resolve()


Says = Callable[..., tuple[int, str, str]]


@pytest.fixture
def says(capsys: pytest.CaptureFixture[str]) -> Says:
    def call(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["evidence", *argv])
        return (code, *capsys.readouterr())

    return call


def test_one_bundle_is_shown_with_its_parameters_files_and_the_lines_that_load_them(
    kept: Path, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = says()
    assert code == 0
    assert "evidence of loss-not-finite at step 8" in out
    assert "4 tensors: not finite in" in out
    assert "0.weight" in out
    assert "try        look at the batch" in out
    assert "alerts/001" in out
    lines = out.splitlines()
    load = lines[next(i for i, line in enumerate(lines) if line.strip().startswith("cd ")) :]
    loaded: dict[str, Any] = {}
    monkeypatch.chdir(kept / "alerts" / "001")
    exec("\n".join(line.strip() for line in load[1:]), loaded)
    assert len(loaded["rows"]) == 8
    assert 0 <= loaded["random"].random() < 1


def test_an_alert_without_evidence_says_why_and_an_unknown_one_what_there_is(kept: Path, says: Says) -> None:
    assert says("1")[0] == says("loss-not-finite")[0] == says("latest", "1")[0] == 0
    assert "has no alert 9; its alerts: 1" in says("9")[2]
    assert 'did you mean "loss-not-finite"?' in says("loss-not-finit")[2]
    assert "has no evidence: its rule does not ask for it" in says("latest", "grads-high")[2]


def test_as_json_it_is_strict_and_names_every_file(kept: Path, says: Says) -> None:
    (bundle,) = json.loads(says("--format", "json")[1])["bundles"]
    assert {file["name"] for file in bundle["files"]} >= {"alert.json", "series.csv", "parameters.csv", "rng.json"}
    assert bundle["alert"]["rule"] == "loss-not-finite"
    assert bundle["parameters"] == 4


def test_a_bundle_that_was_copied_in_part_is_shown_as_far_as_it_goes(kept: Path, says: Says) -> None:
    folder = kept / "alerts" / "001"
    (folder / "alert.json").write_text('{"rule": "loss-')
    (folder / "parameters.csv").unlink()
    (folder / "README").write_bytes(b"\xff\xfe")
    code, out, err = says()
    assert (code, err) == (0, "")
    assert "series.csv" in out


def test_reading_it_needs_no_torch(kept: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from healthcheck.cli import main; sys.exit(main(['evidence']))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_evidence_when_asked(
    going_on: Callable[..., Any], here: Path, says: Says, wait_until: Callable[..., None]
) -> None:
    child = going_on([2.0], 0.02)
    code, out, err = says("latest", "--now")
    assert code == 0, err
    assert "asked " in out
    kept = here / "latest" / "alerts" / "000" / "alert.json"
    wait_until(kept.exists, "the evidence")
    assert child.end() == 0
    alert = json.loads(kept.read_text())
    assert alert["message"] == "a person asked for it"
    assert json.loads((here / "latest" / "report.json").read_text())["alerts"] == []
    assert "has ended (ok)" in says("latest", "--now")[2]
