"""A script that loads a checkpoint of an earlier watched run goes on with that run's detectors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from healthcheck.assembly import open_session
from healthcheck.instrument.script import ScriptTrainer
from healthcheck.record.restarts import KeptStates

TRAIN = """
    import argparse, os, torch
    a = argparse.ArgumentParser()
    a.add_argument("--resume"), a.add_argument("--nan", type=int, default=0), a.add_argument("--steps", type=int, default=60)
    a.add_argument("--without-optimizer", action="store_true"), a.add_argument("--look-back", type=int, default=0)
    a.add_argument("--open", action="store_true")
    a = a.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    begin = 0
    if a.resume:
        saved = torch.load(a.resume)
        model.load_state_dict(saved["model"])
        begin = saved["step"]
        if not a.without_optimizer:
            optimizer.load_state_dict(saved["optimizer"])
    for i in range(begin + 1, a.steps + 1):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i)) * (30 if i in (15, 36, 37) else 1)
        if i == a.nan:
            x = x * float("nan")
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if i == a.look_back:
            torch.load("c20.pt")
        if i % 20 == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": i}
            if a.open:
                with open(f"c{i}.pt", "wb") as file:
                    torch.save(saved, file)
            else:
                torch.save(saved, "unfinished")
                os.replace("unfinished", f"c{i}.pt")
"""

RULES: dict[str, Any] = {
    "loss-not-finite": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["stop"]},
    "spike": {"metric": "loss", "when": {"robust_z": {"above": 8, "window": 20}}, "warmup": 10},
    "far": {"metric": "grad_norm", "when": {"ratio": {"above": 5, "to": "median", "window": 12}}, "warmup": 10},
    "trend": {"metric": "loss", "when": {"slope": {"above": 100, "over": 16}}},
}

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, script: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Play the script as ``healthcheck run`` does, in this process; returns the report and what was said."""
    path = script(TRAIN)
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)

    def play(*argv: str, rules: dict[str, Any] | None = None, target: str = "train.py") -> dict[str, Any]:
        session = open_session(target=target, rules={"version": 1, "rules": rules or RULES}, console=False)
        assert session.info.run_dir is not None
        said: list[str] = []
        session.tell = _listening(session.tell, said)  # type: ignore[method-assign]
        ScriptTrainer(session, store=KeptStates(session, session.info.run_dir)).run(str(path), list(argv))
        assert session.report is not None
        return {**session.report, "said": "\n".join(said), "folder": session.info.run_dir}

    return play


def _listening(tell: Callable[..., None], said: list[str]) -> Callable[..., None]:
    def heard(method: str, *given: Any) -> None:
        if method == "note":
            said.append(given[0])
        tell(method, *given)

    return heard


def alerts(report: dict[str, Any]) -> list[tuple[str, int]]:
    return [(alert["rule"], alert["fired_step"]) for alert in report["alerts"]]


def detectors(report: dict[str, Any], step: int = 60) -> Any:
    state = json.loads((report["folder"] / "checkpoints" / f"step-{step}.json").read_text())["state"]["engine"]
    return state["step"], state["causes"]


def test_a_resumed_run_neither_loses_nor_repeats_an_alert_and_ends_as_the_unbroken_one(run: Run) -> None:
    unbroken = run()
    first = run("--steps", "30")
    resumed = run("--resume", "c20.pt")

    early = [alert for alert in alerts(first) if alert[1] <= 20]
    assert {step for _, step in early} == {15}
    assert alerts(resumed)
    assert early + alerts(resumed) == alerts(unbroken)
    assert detectors(resumed) == detectors(unbroken)
    assert resumed["resumed_from"] == 20
    assert resumed["steps"] == 60


def test_a_stop_is_not_carried_over_and_attempts_are_counted(run: Run) -> None:
    first = run("--nan", "30")
    again = run("--resume", "c20.pt", "--nan", "30")
    third = run("--resume", "c20.pt")

    assert first["stop"]["step"] == again["stop"]["step"] == 30
    name = first["folder"].name
    assert f"continues {name} (stopped at 30 by loss-not-finite; attempt 2)" in again["said"]
    assert f"continues {name} (stopped at 30 by loss-not-finite; attempt 3)" in third["said"]
    assert "stop" not in third
    assert "passed without the fault" not in again["said"]
    assert "step 30 passed without the fault (loss-not-finite)" in third["said"]
    facts = json.loads((third["folder"] / "run.json").read_text())
    assert (facts["resumed_from"], facts["continues"], facts["attempt"]) == (20, name, 3)


def test_the_resume_check_compares_loss_rate_and_optimizer(run: Run) -> None:
    run("--steps", "20")

    whole = run("--resume", "c20.pt")
    forgot = run("--resume", "c20.pt", "--without-optimizer")

    assert "resume check after 20 steps: loss " in whole["said"]
    assert "optimizer state present: ok" in whole["said"]
    assert "optimizer state MISSING: the optimizer began without its moments" in forgot["said"]


@pytest.mark.slow
def test_rules_that_changed_start_fresh_and_are_named(run: Run) -> None:
    run("--steps", "20")

    changed = {**RULES, "spike": {**RULES["spike"], "when": {"robust_z": {"above": 9, "window": 20}}}}
    resumed = run("--resume", "c20.pt", rules={**changed, "lr": {"metric": "lr", "when": {"above": 1}}})

    assert "rules: 3 go on after step 20 with their windows, 2 not (" in resumed["said"]
    assert "spike starts fresh: its metric or condition changed" in resumed["said"]
    assert "lr is new" in resumed["said"]


def test_a_state_that_one_rule_cannot_read_costs_only_that_rule_its_windows(run: Run) -> None:
    first = run("--steps", "20")
    kept = first["folder"] / "checkpoints" / "step-20.json"
    content = json.loads(kept.read_text())
    content["state"]["engine"]["causes"]["trend"]["series"][0]["scorer"] = ["of another version"]
    kept.write_text(json.dumps(content))

    resumed = run("--resume", "c20.pt")

    assert "3 go on after step 20 with their windows, 1 not (trend starts fresh: its saved state cannot be read (ValueError: " in resumed["said"]  # fmt: skip
    assert resumed["steps"] == 60


@pytest.mark.slow
def test_a_state_that_one_probe_cannot_read_costs_no_rule_its_windows(run: Run) -> None:
    first = run("--steps", "20")
    kept = first["folder"] / "checkpoints" / "step-20.json"
    content = json.loads(kept.read_text())
    assert content["state"]["probes"]["loss"]
    content["state"]["probes"]["loss"] = ["of another version"]
    kept.write_text(json.dumps(content))

    resumed = run("--resume", "c20.pt")

    assert "the probe loss starts fresh: its saved state cannot be read (" in resumed["said"]
    assert "4 go on after step 20 with their windows" in resumed["said"]
    assert (resumed["exit_reason"], resumed["steps"]) == (first["exit_reason"], 60)


@pytest.mark.parametrize("damaged", ["{", '{"step": 20, "normal": {}, "state": {"engine": []}}'])
def test_a_lost_state_still_leaves_the_step(run: Run, damaged: str) -> None:
    first = run("--steps", "20")
    (first["folder"] / "checkpoints" / "step-20.json").write_text(damaged)

    resumed = run("--resume", "c20.pt")

    assert "all start fresh after step 20" in resumed["said"]
    assert (resumed["resumed_from"], resumed["steps"]) == (20, 60)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--open",)], ids=["path", "open file"])
def test_a_checkpoint_is_known_by_its_content_wherever_it_was_taken(
    run: Run, tmp_path: Path, options: tuple[str, ...]
) -> None:
    run("--steps", "40", *options)
    (tmp_path / "elsewhere").mkdir()
    shutil.copyfile(tmp_path / "c20.pt", tmp_path / "elsewhere" / "best.pt")

    assert run("--resume", "elsewhere/best.pt", "--steps", "21")["resumed_from"] == 20
    assert run("--resume", "c40.pt", "--steps", "41")["resumed_from"] == 40


@pytest.mark.slow
def test_a_checkpoint_that_was_written_over_is_said_to_be_another(run: Run, tmp_path: Path) -> None:
    run("--steps", "40", "--open")
    shutil.copyfile(tmp_path / "c20.pt", tmp_path / "kept.pt")
    import torch

    saved = torch.load("c20.pt")
    saved["model"]["weight"] += 1
    torch.save(saved, tmp_path / "c20.pt")

    resumed = run("--resume", "c20.pt")

    assert "resumed_from" not in resumed
    assert "c20.pt is not the file that" in resumed["said"]


@pytest.mark.slow
def test_a_checkpoint_loaded_in_the_middle_of_training_is_no_resume(run: Run) -> None:
    run("--steps", "20")

    looking = run("--look-back", "10")

    assert "continues" not in looking["said"]
    assert looking["steps"] == 60


@pytest.mark.slow
def test_another_script_that_loads_the_checkpoint_is_another_run(run: Run) -> None:
    run("--steps", "20")

    assert "resumed_from" not in run("--resume", "c20.pt", "--steps", "25", target="finetune.py")


@pytest.mark.slow
def test_ranks_without_a_process_group_are_not_continued_and_it_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("--steps", "20")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")

    resumed = run("--resume", "c20.pt", "--steps", "25")

    assert "is not continued: the ranks have no process group yet to agree through" in resumed["said"]
    assert resumed["steps"] == 5


def test_nothing_is_left_beside_the_files_of_the_user(run: Run, tmp_path: Path) -> None:
    run("--steps", "20")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["c20.pt", "runs", "train.py"]


# -- the last good checkpoint ---------------------------------------------------------


def test_the_last_checkpoint_written_while_all_was_finite_is_named_where_it_lies_now(run: Run, tmp_path: Path) -> None:
    report = run("--nan", "45")

    assert report["last_good_checkpoint"] == {"path": str(tmp_path / "c40.pt"), "step": 40, "needed": True}


def test_a_checkpoint_written_after_the_fault_is_not_the_good_one(run: Run, tmp_path: Path) -> None:
    only_warns = {"loss-not-finite": {"metric": "loss", "when": "nonfinite"}}

    report = run("--nan", "35", rules=only_warns)

    assert (tmp_path / "c60.pt").exists()
    assert report["last_good_checkpoint"]["step"] == 20


def test_without_a_rule_that_looks_no_checkpoint_is_vouched_for(run: Run) -> None:
    assert "last_good_checkpoint" not in run(rules={"lr": {"metric": "lr", "when": {"above": 1}}})


# -- as people run it -------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_continues_a_run_that_it_stopped(tmp_path: Path, script: Callable[..., Path]) -> None:
    script(TRAIN)
    (tmp_path / "healthcheck.yaml").write_text(json.dumps({"version": 1, "rules": RULES}))
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HEALTHCHECK")}

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "healthcheck", "run", "train.py", *words]
        env = {**clean, "OMP_NUM_THREADS": "1"}
        return subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)

    stopped = command("--nan", "45")
    resumed = command("--resume", "c40.pt")

    assert stopped.returncode == 1
    said = " ".join(stopped.stderr.split())  # however it was broken into lines
    assert f"last checkpoint written while all was finite: step 40, {tmp_path / 'c40.pt'}" in said
    assert "(stopped at 45 by loss-not-finite; attempt 2)" in resumed.stderr
    assert "4 go on after step 40 with their windows" in resumed.stderr
    assert "step 45 passed without the fault" in resumed.stderr
    assert resumed.returncode == 0, resumed.stderr
