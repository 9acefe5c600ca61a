"""Libraries without an adapter of their own, each with the real package: what is seen of a training, and what stops one.

Skipped where a package is not installed; ``make zoo`` installs all of them. With ``HEALTHCHECK_UPDATE_ZOO=1`` what was found is
written to ``docs/_libraries.json``, from which ``docs/reference/capabilities.md`` is made.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "docs" / "_libraries.json"
PACKAGES = {
    "keras": "keras",
    "fastai": "fastai",
    "skorch": "skorch",
    "ignite": "pytorch-ignite",
    "timm": "timm",
    "stable_baselines3": "stable-baselines3",
    "sentence_transformers": "sentence-transformers",
    "ultralytics": "ultralytics",
    "deepspeed": "deepspeed",
}
VISION = {"timm", "ultralytics"}
"""What needs torchvision, which lies in a folder of its own: beside a torch for CPUs it cannot be imported by others."""
ASIDE = {**dict.fromkeys(VISION, "vision"), "deepspeed": "deepspeed"}
"""What is installed into a folder of its own below the environment; DeepSpeed, since transformers and Accelerate use it wherever they see it."""
RULES = """
version: 1
extends: [healthcheck:recommended]
rules:
  jump: {metric: loss, when: {zscore: {above: 8, window: 20}}, min_samples: 15, severity: warning, then: [warn]}
  step-leak: {metric: memory.step_growth, when: {above: "8MiB"}, for: 5 of 10, severity: warning, then: [warn]}
"""
NO_EVALUATION = {"stable_baselines3"}
"""Reinforcement learning has rewards instead of a held-out set."""
SAVES_OTHERWISE = {
    "keras": "Keras saves by h5py, not by torch",
    "stable_baselines3": "it saves into a zip file",
    "ultralytics": "it saves into memory first",
}
"""What is loaded is not recognised as a checkpoint of an earlier run."""
WITHOUT_EPOCHS = {"timm", "stable_baselines3", "deepspeed"}

pytestmark = pytest.mark.slow


def aside(library: str) -> str:
    """The folder in which a library is, if it is not in the environment itself; else nothing."""
    return str(Path(sys.prefix) / ASIDE[library]) if library in ASIDE else ""


def installed(library: str) -> bool:
    return find_spec(library) is not None or (library in ASIDE and (Path(aside(library)) / library).is_dir())


class Ran:
    """One training."""

    def __init__(self, command: Callable[..., Any], folder: Path, library: str, mode: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "report.json").unlink(missing_ok=True)
        (folder / "rules.yaml").write_text(RULES)
        path = os.pathsep.join([str(HERE), *filter(None, [aside(library)])])
        words = ("run", "--rules", "rules.yaml", "--report", "json=report.json", HERE / "loops.py", library, mode)
        self.result = command(
            *words,
            cwd=folder,
            env={"PYTHONPATH": path, "HEALTHCHECK_RUNS": str(folder / "runs"), "DS_ACCELERATOR": "cpu"},
        )
        assert (folder / "report.json").exists(), self.result.stderr
        self.report = json.loads((folder / "report.json").read_text())
        run = (folder / "runs" / "latest").resolve()
        self.samples: dict[str, list[tuple[int, float]]] = {}
        for line in (run / "samples.jsonl").read_text().splitlines():
            entry = json.loads(line)
            for metric, value in entry.get("m", {}).items():
                self.samples.setdefault(metric, []).append((entry["step"], float(value)))

    @property
    def alerts(self) -> dict[str, int]:
        return {alert["rule"]: alert["fired_step"] for alert in self.report["alerts"] if alert["severity"] != "info"}

    def said(self, word: str) -> list[str]:
        lines = [line.split() for line in self.result.stdout.splitlines() if line.startswith(word)]
        return lines[-1][1:] if lines else []


@pytest.fixture
def train(healthcheck_command: Callable[..., Any], tmp_path: Path) -> Callable[[str, str], Ran]:
    @cache
    def run(library: str, mode: str) -> Ran:
        if not installed(library):
            pytest.skip(f"{PACKAGES[library]} is not installed; `make zoo` installs it")
        kept = "resumed" if mode in ("save", "resume") else mode  # one goes on from what the other has saved
        return Ran(healthcheck_command, tmp_path / f"{library}-{kept}", library, mode)

    return run


def keep(library: str, **facts: str) -> None:
    """What was found, for the documentation."""
    if os.environ.get("HEALTHCHECK_UPDATE_ZOO") != "1":
        return
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    try:
        which = version(PACKAGES[library])
    except PackageNotFoundError:
        found = list(Path(aside(library)).glob(f"{library}-*.dist-info"))
        which = found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else ""
    known.setdefault(library, {}).update({"version": which, **facts})
    RESULTS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")


@pytest.mark.parametrize("library", PACKAGES)
def test_a_healthy_training_is_seen_and_silent(library: str, train: Callable[[str, str], Ran]) -> None:
    ran = train(library, "healthy")
    assert ran.result.returncode == 0, ran.result.stderr
    assert ran.said("FINITE") == ["True"]
    # The loss of a policy jumps by itself; that rule is ours, for the other libraries.
    assert ran.alerts.keys() <= ({"jump"} if library in NO_EVALUATION else set())
    assert ran.report["steps"] == len({step for step, _ in ran.samples["loss"]})
    assert {"loss", "grad_norm", "lr", "update_ratio"} <= ran.samples.keys()
    facts = {"steps": "works"}
    if library in NO_EVALUATION:
        assert "kl" in ran.samples
        facts["evaluation"] = "differs: what its logger says of rollouts"
    else:
        told = [value for _, value in ran.samples["eval.loss"]]
        if ran.said("HELD"):
            assert told == pytest.approx([float(value) for value in ran.said("HELD")], rel=1e-3)
        assert len(told) == 3
        facts["evaluation"] = "works"
    if library in WITHOUT_EPOCHS:
        facts["epochs"] = (
            "cannot: it counts timesteps" if library in NO_EVALUATION else "cannot: its loop is the script's own"
        )
    else:
        assert {"epoch_start", "epoch_end"} <= set(ran.report["capabilities"]["events"])
        facts["epochs"] = "works"
    keep(library, **facts)


@pytest.mark.parametrize("library", PACKAGES)
def test_a_nan_is_stopped_before_the_update(library: str, train: Callable[[str, str], Ran]) -> None:
    ran = train(library, "nan")
    assert ran.result.returncode == 1, ran.result.stderr
    assert ran.said("FINITE") == ["True"]
    assert ran.report["stop"]["step"] == 25
    keep(library, nan="works", stop="works")


@pytest.mark.parametrize("library", PACKAGES)
def test_a_spike_is_found_at_its_step(library: str, train: Callable[[str, str], Ran]) -> None:
    ran = train(library, "spike")
    assert ran.alerts.get("jump") == 25
    keep(library, spike="works")


@pytest.mark.parametrize("library", PACKAGES)
def test_a_forward_pass_that_leaks_is_found_or_said_not_to_be_judged(
    library: str, train: Callable[[str, str], Ran]
) -> None:
    ran = train(library, "leak")
    judged = ran.report["rules"]["step-leak"]
    if judged["verdict"] == "not judged":
        assert "nobody says when a step begins" in judged["reason"]
        keep(library, leak="cannot: its batches come from no DataLoader")
    else:
        assert "step-leak" in ran.alerts
        keep(library, leak="works")


@pytest.mark.parametrize("library", PACKAGES)
def test_a_training_goes_on_from_the_checkpoint_of_its_library(library: str, train: Callable[[str, str], Ran]) -> None:
    before, after = train(library, "save"), train(library, "resume")
    assert (before.result.returncode, after.result.returncode) == (0, 0), after.result.stderr
    assert after.alerts.keys() <= ({"jump"} if library in NO_EVALUATION else set())
    if library in SAVES_OTHERWISE:
        assert after.report.get("resumed_from") is None
        keep(library, resume=f"differs: a run of its own, for {SAVES_OTHERWISE[library]}")
        return
    assert after.report["resumed_from"] == before.report["steps"]
    assert after.report["steps"] == before.report["steps"] * 3 // 2
    assert "resume check after 20 steps" in after.result.stderr
    keep(library, resume="works")
