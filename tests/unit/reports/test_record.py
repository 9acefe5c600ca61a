"""The record: complete enough to judge the run again, private, and harmless to the run."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from healthcheck.cli import main
from healthcheck.engine.engine import Engine
from healthcheck.record.runs import Run, find_run

HEALTHY = [2 + 0.01 * math.sin(i) for i in range(60)]
SPIKES = [20.0 if i in (40, 41) else v for i, v in enumerate(HEALTHY)]
Watched = Callable[..., Any]


def test_the_record_of_a_run_has_these_files(watched: Watched) -> None:
    watched(series={"loss": SPIKES, "norm": HEALTHY})
    folder = find_run().folder
    names = {path.name for path in folder.iterdir()}
    assert names == {".gitignore", "run.json", "rules.yaml", "samples.jsonl", "alerts.jsonl", "report.json"}


@pytest.mark.skipif(os.name != "posix", reason="modes")
def test_its_files_are_for_their_owner_alone(watched: Watched) -> None:
    watched(series={"loss": SPIKES, "norm": HEALTHY})
    open_to_others = [
        p.name for p in find_run().folder.iterdir() if p.name != ".gitignore" and p.stat().st_mode & 0o077
    ]
    assert open_to_others == []


def test_every_line_is_strict_json(watched: Watched) -> None:
    watched(series={"loss": [*HEALTHY, math.nan, math.inf], "norm": HEALTHY})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    folder = find_run().folder
    for name in ("samples.jsonl", "alerts.jsonl"):
        for line in (folder / name).read_text().splitlines():
            json.loads(line, parse_constant=refuse)
    for name in ("run.json", "report.json"):
        json.loads((folder / name).read_text(), parse_constant=refuse)


def replay(run: Run, **options: Any) -> list[tuple[Any, ...]]:
    """(rule, fired, cleared, value, score) of the alerts that the record gives."""
    from healthcheck.assembly import load_rules_for, plugin_host

    rules = load_rules_for(rules=[str(run.rules_file)], host=plugin_host())
    engine = Engine(rules, **options)
    for batch in run.samples.batches:
        engine.evaluate(batch.at, batch.samples, batch.now)
    return [(a.rule, a.fired_step, a.cleared_step, a.value, a.score) for a in engine.alerts]


def recorded(run: Run) -> list[tuple[Any, ...]]:
    def number(value: Any) -> Any:
        return None if value is None else float(value)

    return [
        (a["rule"], a["fired_step"], a.get("cleared_step"), number(a["value"]), number(a.get("score")))
        for a in run.alerts
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_record_gives_the_same_alerts_again(seed: int, watched: Watched) -> None:
    """With holes, spikes and several rules on one metric; bit-equal scores, not nearly equal ones."""
    rng = random.Random(seed)
    loss = [2 + rng.gauss(0, 0.05) + (rng.random() < 0.03) * 9 for _ in range(400)]
    norm = [1 + rng.gauss(0, 0.1) + (rng.random() < 0.05) * 5 if rng.random() > 0.2 else None for _ in range(400)]
    rules = {
        "version": 1,
        "external": ["loss", "norm"],
        "metrics": {"product": "loss * norm"},
        "rules": {
            "spike": {"metric": "loss", "when": {"robust_z": {"above": 8, "window": 50}}},
            "z": {"metric": "norm", "when": {"zscore": {"above": 4, "window": 30}}, "for": "2 of 5"},
            "high": {"metric": "product", "when": {"above": 12}, "recover": {"below": 2}},
            "gone": {"metric": "norm", "when": {"missing": {"after": 3}}, "for": 2},
        },
    }
    watched(series={"loss": loss, "norm": norm}, rules=rules)
    run = find_run()
    assert run.samples.complete
    assert len({a["rule"] for a in run.alerts}) >= 3, "the test must see alerts to mean something"
    assert replay(run) == recorded(run)


def test_alerts_are_on_disk_while_the_run_goes_on(
    runs: Path, sessions: ModuleType, wait_until: Callable[..., None]
) -> None:
    session = sessions.open_session(target="t.py", rules=sessions.RULES, console=False)
    sessions.play(session, {"loss": SPIKES, "norm": HEALTHY})
    wait_until(lambda: find_run().alerts, "an alert on disk")
    run = find_run()
    assert run.report is None
    assert run.status == "running"
    assert [(a["rule"], a["fired_step"]) for a in run.alerts] == [("loss-spike", 42)]
    session.finish(sessions.Ending())


def test_a_run_that_ends_while_it_is_looked_at_is_not_taken_for_a_killed_one(
    runs: Path, sessions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = sessions.open_session(target="t.py", rules=sessions.RULES, console=False)
    sessions.play(session, {"loss": HEALTHY, "norm": HEALTHY})

    def ends_meanwhile(pid: int) -> bool:
        session.finish(sessions.Ending())
        return False

    monkeypatch.setattr("healthcheck.record.runs._alive", ends_meanwhile)
    assert find_run().status == "ok"


@pytest.mark.slow
def test_kill_9_loses_nothing_that_was_written_and_leaves_no_hole(
    process: Callable[..., subprocess.Popen[bytes]], runs: Path, wait_until: Callable[..., None]
) -> None:
    """How long a line may wait to be written: ``test_writing.py``."""
    child = process(series={"loss": HEALTHY, "norm": HEALTHY}, pause=0.01, until=str(runs / "never"), console=False)

    def recorded_steps() -> int:
        return len(find_run().samples.batches) if list(runs.glob("*/samples.jsonl")) else 0

    wait_until(lambda: recorded_steps() > 100, "a record that grows")
    seen = recorded_steps()
    os.kill(child.pid, signal.SIGKILL)
    child.wait(120)
    run = find_run()
    batches = run.samples.batches
    assert [batch.at for batch in batches] == list(range(1, len(batches) + 1)), "no hole before the end"
    assert len(batches) >= seen
    assert run.status == "killed"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_said_once_and_the_run_is_judged_to_its_end(watched: Watched, small_disk: Path) -> None:
    long = HEALTHY * 30
    result = watched(
        series={"loss": long, "norm": long}, pause=0.0005, env={"HEALTHCHECK_RUNS": str(small_disk / "runs")}
    )
    assert result.returncode == 0
    assert result.stderr.count("No space left") == 1, result.stderr
    assert "healthcheck: OK, 1,800 steps" in result.stderr


def test_a_disk_that_is_full_from_the_start_is_said_once_in_the_start_block(watched: Watched, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(b"x" * 2**16)
    runs = small_disk / "runs"
    result = watched(
        series={"loss": HEALTHY, "norm": HEALTHY}, env={"HEALTHCHECK_RUNS": str(runs), "TMPDIR": str(runs)}
    )
    assert result.returncode == 0
    lines = result.stderr.splitlines()
    assert result.stderr.count("No space left") == 1, result.stderr
    assert lines[0].startswith("healthcheck 0.1.0: watching")
    assert "No space left" in lines[2]
    assert any(line.startswith("healthcheck: OK, 60 steps") for line in lines)


def test_a_folder_that_vanishes_is_said_once(
    runs: Path, sessions: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    import shutil

    session = sessions.open_session(target="t.py", rules=sessions.RULES)
    shutil.rmtree(runs)
    sessions.play(session, {"loss": HEALTHY, "norm": HEALTHY})
    report = session.finish(sessions.Ending())
    assert report["exit_code"] == 0
    assert capfd.readouterr().err.count("No such file") == 1


def test_no_secret_of_the_command_line_is_recorded(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-env")
    argv = [
        "train.py",
        "--api-key",
        "s3cr3t-a",
        "--hub_token=s3cr3t-b",
        "--url",
        "https://me:s3cr3t-c@host/x",
        "--lr",
        "1e-4",
    ]
    watched(series={"loss": [*HEALTHY, math.nan], "norm": HEALTHY}, argv=argv)
    folder = find_run().folder
    for path in folder.rglob("*"):
        if path.is_file():
            assert "s3cr3t" not in path.read_text(errors="replace"), path
    assert "1e-4" in (folder / "run.json").read_text()


def test_a_quiet_rank_leaves_nothing_and_one_with_an_alert_writes_around_it(
    runs: Path, sessions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29511")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    zero = sessions.open_session(target="t.py", rules=sessions.RULES, console=False)
    monkeypatch.setenv("RANK", "1")
    quiet = sessions.open_session(target="t.py", rules=sessions.RULES, console=False)
    sessions.play(quiet, {"loss": HEALTHY})
    quiet.finish(sessions.Ending())
    folder = zero.info.run_dir / "rank-1"
    assert not folder.exists()

    long = [2 + 0.01 * math.sin(i) for i in range(1000)]
    long[600] = long[601] = 20.0
    loud = sessions.open_session(target="t.py", rules=sessions.RULES, console=False)
    sessions.play(loud, {"loss": long})
    loud.finish(sessions.Ending())
    steps = [batch.at for batch in Run(folder).samples.batches]
    assert {a["rule"] for a in Run(folder).alerts} == {"loss-spike"}
    assert set(range(410, 640)) <= set(steps)
    assert 100 not in steps
    assert 900 not in steps
    zero.finish(sessions.Ending())


def test_record_ranks_all_makes_every_rank_keep_everything(
    runs: Path, sessions: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", "29512")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    zero = sessions.open_session(target="t.py", rules=sessions.RULES, console=False)
    monkeypatch.setenv("RANK", "1")
    one = sessions.open_session(target="t.py", rules=sessions.RULES, console=False, settings={"record_ranks": "all"})
    sessions.play(one, {"loss": HEALTHY})
    one.finish(sessions.Ending())
    assert len(Run(zero.info.run_dir / "rank-1").samples.batches) == len(HEALTHY)
    zero.finish(sessions.Ending())


def test_report_json_goes_where_ci_wants_it(watched: Watched, tmp_path: Path) -> None:
    watched(series={"loss": HEALTHY, "norm": HEALTHY}, reports={"json": "out/hc.json"})
    copy = json.loads((tmp_path / "out" / "hc.json").read_text())
    assert copy["format"] == "healthcheck-report"
    assert copy == find_run().report


def test_a_plugin_that_puts_nan_into_the_report_does_not_cost_the_report(runs: Path, sessions: ModuleType) -> None:
    session = sessions.open_session(target="t.py", rules=sessions.RULES, console=False)
    session.on("report_section", lambda session, report: report.update(acme={"x": math.nan, "y": object()}))
    sessions.play(session, {"loss": HEALTHY})
    session.finish(sessions.Ending())
    report = find_run().report
    assert report is not None
    assert report["acme"]["x"] == "nan"


def test_a_long_run_of_few_metrics_stays_small(runs: Path, sessions: ModuleType) -> None:
    """Records of healthy runs are to stay below 5 MB: about 100 bytes a step."""
    session = sessions.open_session(target="t.py", rules=sessions.RULES, console=False)
    sessions.play(session, {"loss": HEALTHY * 10, "norm": HEALTHY * 10})
    session.finish(sessions.Ending())
    size = (find_run().folder / "samples.jsonl").stat().st_size
    assert size / 600 < 100


def test_the_rules_of_runs_that_are_judged_alike_are_one_file_on_disk(watched: Watched, runs: Path) -> None:
    for _ in range(2):
        watched(series={"loss": HEALTHY})
    watched(
        series={"loss": HEALTHY}, rules={"version": 1, "rules": {"other": {"metric": "loss", "when": {"above": 9}}}}
    )
    first, second, other = (path / "rules.yaml" for path in sorted(runs.glob("[0-9]*")))
    assert first.stat().st_ino == second.stat().st_ino != other.stat().st_ino
    content = first.read_text()
    first.unlink()  # as pruning does
    assert second.read_text() == content


def test_a_record_of_a_newer_version_is_refused_in_one_sentence(
    watched: Watched, capfd: pytest.CaptureFixture[str]
) -> None:
    watched(series={"loss": HEALTHY})
    folder = find_run().folder
    facts = json.loads((folder / "run.json").read_text())
    assert facts["version"] == 2
    (folder / "run.json").write_text(json.dumps({**facts, "version": 1}))
    assert main(["report", folder.name]) == 0  # those of 0.1 are read
    (folder / "run.json").write_text(json.dumps({**facts, "version": 3}))
    capfd.readouterr()
    for command in ("report", "why", "metrics", "top"):
        assert main([command, folder.name]) == 4
        assert "recorded by a newer healthcheck (record version 3" in capfd.readouterr().err
    assert main(["runs"]) == 0
