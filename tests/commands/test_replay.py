"""``healthcheck replay``: recorded runs of other tools, judged as if they ran now."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from healthcheck.cli import main

RULES = """
version: 1
rules:
  loss-nan: {metric: loss, when: nonfinite, severity: error, then: [stop]}
  loss-high: {metric: loss, when: {above: 5}, for: 2, message: "loss is {value:.1f}"}
  spike: {metric: loss, when: {robust_z: {above: 8, window: 50}}, for: 2}
  grads: {metric: grad_norm, when: nonfinite, only_if: {amp.skipped: 0}, severity: error, then: [stop]}
  lr-zero: {metric: lr, when: {equals: 0}, for: 3}
"""

Says = Callable[..., tuple[int, str, str]]


def losses(n: int = 100, *, bad: Iterable[tuple[int, float]] = ()) -> list[float]:
    noise = random.Random(7)
    values = [2.0 + noise.gauss(0, 0.05) for _ in range(n)]
    for at, value in bad:
        values[at - 1] = value
    return values


def csv(path: Path, values: list[float], *, every: int = 1, more: str = "") -> Path:
    rows = [f"{i * every},{value}" for i, value in enumerate(values, 1)]
    path.write_text("step,loss\n" + "\n".join(rows) + "\n" + more)
    return path


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Says:
    """``says("run.csv", "--jobs", 2)``: exit code, stdout, stderr of ``replay`` in an empty folder with RULES."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "healthcheck.yaml").write_text(RULES)

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["replay", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_the_timeline_says_when_each_rule_would_have_fired(says: Says, tmp_path: Path) -> None:
    csv(tmp_path / "run.csv", losses(bad=[(60, 9.0), (61, 9.5), (80, math.nan)]))
    code, out, _ = says("run.csv")
    assert code == 1
    assert "WARN   loss-high  step 61" in out
    assert "loss is 9.5 (cleared at 63)" in out
    assert "ERROR  loss-nan   step 80" in out
    assert "would have been stopped at step 80 by loss-nan" in out
    assert out.rstrip().endswith("exit 1")


def test_a_rule_without_its_metric_is_not_judged_and_the_record_is_named_as_the_reason(
    says: Says, tmp_path: Path
) -> None:
    csv(tmp_path / "run.csv", losses())
    code, out, _ = says("run.csv", "--format", "json")
    (report,) = json.loads(out)
    assert code == 0
    assert report["rules"]["lr-zero"] == report["rules"]["lr-zero"] | {
        "verdict": "not judged",
        "reason": "the record has no lr",
    }
    assert report["path"] == "run.csv"
    assert report["record"]["rows"] == 100


def test_a_record_that_tells_no_rule_anything_exits_5_and_is_no_pass(says: Says, tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_text("step,accuracy\n1,0.5\n2,0.6\n3,0.7\n")
    code, out, _ = says("run.csv")
    assert code == 5
    assert "NOT JUDGED" in out


def test_rows_at_every_500th_step_count_as_samples_and_warm_up_in_steps(says: Says, tmp_path: Path) -> None:
    csv(tmp_path / "run.csv", losses(12, bad=[(3, 9.0), (10, 9.0), (11, 9.0)]), every=500)
    code, out, _ = says("run.csv", "--format", "json", "--set", "loss-high.warmup=2000", "--only", "loss-high")
    (alert,) = json.loads(out)[0]["alerts"]
    assert code == 0
    assert (alert["fired_step"], alert["fired_sample"]) == (5500, 11)


def test_a_guard_that_the_record_cannot_know_makes_an_error_a_note_and_stops_nothing(
    says: Says, tmp_path: Path
) -> None:
    lines = [json.dumps({"step": i, "loss": 2.0, "grad_norm": 1.0 if i != 7 else math.nan}) for i in range(1, 30)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    code, out, _ = says("log.jsonl", "--format", "json")
    (report,) = json.loads(out)
    (alert,) = report["alerts"]
    assert code == 0
    assert alert["rule"] == "grads"
    assert alert["severity"] == "info"
    assert "amp.skipped" in alert["facts"]["capped"]
    assert "stop" not in report


def test_a_guard_that_the_record_knows_is_kept(says: Says, tmp_path: Path) -> None:
    def row(i: int) -> dict[str, float]:
        return {"step": i, "loss": 2.0, "grad_norm": math.inf if i in (7, 20) else 1.0, "amp.skipped": float(i == 7)}

    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(row(i)) for i in range(1, 30)))
    code, out, _ = says("log.jsonl", "--format", "json", "--only", "grads")
    (alert,) = json.loads(out)[0]["alerts"]
    assert code == 1
    assert (alert["fired_step"], alert["severity"]) == (20, "error")


def test_steps_that_fall_after_a_resume_are_judged_and_every_counts_on(says: Says, tmp_path: Path) -> None:
    first = [f"{i},2.0" for i in range(1, 101)]
    again = [f"{i},{9.0 if i >= 70 else 2.0}" for i in range(51, 121)]
    (tmp_path / "run.csv").write_text("step,loss\n" + "\n".join(first + again) + "\n")
    code, out, _ = says(
        "run.csv", "--format", "json", "--only", "loss-high", "--set", "loss-high.every=10", "--set", "loss-high.for=1"
    )
    (report,) = json.loads(out)
    assert report["record"]["resumes"] == [{"before": 100, "step": 51}]
    assert [a["fired_step"] for a in report["alerts"]] == [70]
    assert code == 0


def test_a_metric_that_vanishes_is_missing_also_after_the_step_fell(says: Says, tmp_path: Path) -> None:
    rules = "version: 1\nrules:\n  gone: {metric: loss, when: {missing: 20}}\n"
    (tmp_path / "gone.yaml").write_text(rules)
    rows = [{"step": i, "lr": 1.0, "loss": 2.0} for i in range(1, 101)]
    rows += [{"step": i, "lr": 1.0} | ({"loss": 2.0} if i < 60 else {}) for i in range(51, 101)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _, out, _ = says("log.jsonl", "--rules", "gone.yaml", "--format", "json")
    (alert,) = json.loads(out)[0]["alerts"]
    assert 78 <= alert["fired_step"] <= 80


def test_the_absence_of_a_metric_that_was_never_logged_is_not_judged(says: Says, tmp_path: Path) -> None:
    (tmp_path / "gone.yaml").write_text("version: 1\nrules:\n  gone: {metric: grad_norm, when: {missing: 20}}\n")
    csv(tmp_path / "run.csv", losses())
    code, out, _ = says("run.csv", "--rules", "gone.yaml", "--format", "json")
    assert code == 5
    assert json.loads(out)[0]["rules"]["gone"]["reason"] == "the record has no grad_norm"


def test_a_stale_metric_is_judged_by_the_clock_of_the_record(says: Says, tmp_path: Path) -> None:
    (tmp_path / "stale.yaml").write_text("version: 1\nrules:\n  silent: {metric: eval.loss, when: {stale: 60s}}\n")
    rows = [
        {"step": i, "elapsed": i * 2.0, "loss": 2.0} | ({"eval_loss": 2.1} if i % 10 == 0 and i <= 40 else {})
        for i in range(1, 101)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _, out, _ = says("log.jsonl", "--rules", "stale.yaml", "--format", "json")
    (alert,) = json.loads(out)[0]["alerts"]
    assert alert["fired_step"] == 69  # during step 69 the last value (step 40) is 60 s old


def test_without_a_clock_nothing_is_stale(says: Says, tmp_path: Path) -> None:
    (tmp_path / "stale.yaml").write_text("version: 1\nrules:\n  silent: {metric: loss, when: {stale: 60s}}\n")
    csv(tmp_path / "run.csv", losses())
    code, out, _ = says("run.csv", "--rules", "stale.yaml", "--format", "json")
    assert json.loads(out)[0]["alerts"] == []
    assert code == 0


def test_a_damaged_file_is_reported_and_the_rest_goes_on(says: Says, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    csv(runs / "good.csv", losses())
    (runs / "broken.json").write_text('{"log_history": [{"step": 1, "loss"')
    (tmp_path / "notes.bin").write_bytes(b"\x00\x01" * 500)
    code, out, err = says("runs", "notes.bin")
    assert code == 4
    assert "notes.bin" in err
    assert "good.csv" in out


def test_a_path_that_does_not_exist_is_refused_before_anything_is_read(says: Says, tmp_path: Path) -> None:
    csv(tmp_path / "run.csv", losses())
    code, out, err = says("run.csv", "rnu.csv")
    assert (code, out) == (4, "")
    assert "there is no rnu.csv" in err


def test_a_broken_rule_is_refused_before_anything_is_read(says: Says, tmp_path: Path) -> None:
    csv(tmp_path / "run.csv", losses())
    (tmp_path / "bad.yaml").write_text("version: 1\nrules:\n  x: {metric: los, when: {above: 1}}\n")
    code, out, err = says("run.csv", "--rules", "bad.yaml")
    assert (code, out) == (4, "")
    assert "bad.yaml:3:" in err


def test_many_runs_become_a_table_whose_exit_code_is_the_worst(says: Says, tmp_path: Path) -> None:
    for i in range(6):
        csv(tmp_path / f"run{i}.csv", losses(bad=[(80, math.nan)] if i == 3 else []))
    code, out, _ = says("run*.csv")
    assert code == 1
    table = [line.split() for line in out.splitlines() if line.startswith("  run")]
    assert [row[0] for row in table] == ["run", *(f"run{i}.csv" for i in range(6))]
    assert table[4][1:4] == ["STOPPED", "loss-nan", "80"]
    assert "6 runs, 600 rows: stopped 1, ok 5" in out


def test_among_very_many_runs_those_that_are_ok_are_counted_and_the_others_listed(says: Says, tmp_path: Path) -> None:
    for i in range(61):
        csv(tmp_path / f"run{i:02}.csv", losses(bad=[(80, math.nan)] if i == 33 else []))
    code, out, _ = says("run*.csv")
    assert code == 1
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  run")] == ["run", "run33.csv"]
    assert "and 60 runs that are ok" in out
    assert "61 runs, 6,100 rows: stopped 1, ok 60" in out


@pytest.mark.slow
def test_several_processes_say_the_same_in_the_same_order(says: Says, tmp_path: Path) -> None:
    for i in range(4):
        csv(tmp_path / f"run{i}.csv", losses(bad=[(40 + i, 9.0), (41 + i, 9.0)]))
    alone = says("run*.csv", "--format", "json")
    together = says("run*.csv", "--format", "json", "--jobs", 2)
    assert together == alone
    assert [a["fired_step"] for r in json.loads(alone[1]) for a in r["alerts"] if a["rule"] == "loss-high"] == [
        41,
        42,
        43,
        44,
    ]


def test_derived_metrics_start_empty_for_each_run(says: Says, tmp_path: Path) -> None:
    rules = "version: 1\nmetrics: {smooth: 'ewma(loss, 100) + 0 * loss'}\nrules:\n  high: {metric: smooth, when: {above: 4}}\n"
    (tmp_path / "derived.yaml").write_text(rules)
    csv(tmp_path / "a.csv", [9.0] * 50)
    csv(tmp_path / "b.csv", [2.0] * 50)
    _, out, _ = says("a.csv", "b.csv", "--rules", "derived.yaml", "--format", "json")
    assert [len(r["alerts"]) for r in json.loads(out)] == [1, 0]


def test_muted_steps_do_not_count_and_a_mute_without_effect_is_named(says: Says, tmp_path: Path) -> None:
    csv(tmp_path / "run.csv", losses(bad=[(60, 9.0), (61, 9.0)]))
    code, out, _ = says(
        "run.csv",
        "--fail-on",
        "warning",
        "--mute",
        "loss-high@50..70",
        "--mute",
        "spike@50..70",
        "--mute",
        "lr-zero@1..2",
    )
    assert code == 0
    assert "muted" in out
    assert "mutes that matched nothing: lr-zero" in out


def test_fail_on_warning_makes_a_warning_count(says: Says, tmp_path: Path) -> None:
    csv(tmp_path / "run.csv", losses(bad=[(60, 9.0), (61, 9.0)]))
    assert says("run.csv")[0] == 0
    assert says("run.csv", "--fail-on", "warning")[0] == 1


def test_show_columns_and_map_decide_what_is_read(says: Says, tmp_path: Path) -> None:
    rows = "".join(f"{i},{9.0 if i > 50 else 1.0}\n" for i in range(1, 101))
    (tmp_path / "run.csv").write_text("n,my_objective\n" + rows)
    code, out, _ = says("run.csv", "--show-columns", "--map", "my_objective=loss", "--map", "n=step")
    assert code == 0
    assert "loss" in out
    assert "my_objective" in out
    _, out, _ = says("run.csv", "--map", "my_objective=loss", "--map", "n=step", "--format", "json")
    assert [a["fired_step"] for a in json.loads(out)[0]["alerts"] if a["rule"] == "loss-high"] == [52]


def test_a_text_log_is_read_by_a_pattern(says: Says, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        "".join(f"[{i}] objective was {9.0 if i > 50 else 2.0}!\n" for i in range(1, 80))
    )
    _, out, _ = says("train.log", "--pattern", r"\[(?P<step>\d+)\] objective was (?P<loss>[\d.]+)", "--format", "json")
    assert [a["fired_step"] for a in json.loads(out)[0]["alerts"] if a["rule"] == "loss-high"] == [52]


def test_a_gzip_that_breaks_off_is_judged_as_far_as_it_goes_and_says_so(says: Says, tmp_path: Path) -> None:
    import gzip

    noise = random.Random(3)
    text = "".join(json.dumps({"step": i, "loss": 2.0 + noise.random()}) + "\n" for i in range(1, 40001))
    packed = gzip.compress(text.encode())
    (tmp_path / "log.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    _, out, _ = says("log.jsonl.gz", "--format", "json")
    (report,) = json.loads(out)
    assert 1000 < report["record"]["rows"] < 40000
    assert "reading ended" in report["record"]["problem"]


def test_replay_neither_imports_torch_nor_writes_anything(tmp_path: Path) -> None:
    csv(tmp_path / "run.csv", losses())
    code = (
        "import sys; from healthcheck.cli import main; code = main(['replay', 'run.csv']);"
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.csv"]


def test_a_condition_of_a_plugin_that_raises_is_the_plugins_fault_and_no_pass(says: Says, tmp_path: Path) -> None:
    plugin = """
import healthcheck
from healthcheck import CompiledCondition, ConditionType, Threshold

class Broken:
    normal = None
    memoryless = False
    def update(self, values, steps, quiet):
        raise ZeroDivisionError("boom")
    def bound(self, healthy):
        return None
    def state(self):
        return None
    def restore(self, state):
        pass

@healthcheck.hookimpl
def healthcheck_register_conditions(register):
    register(ConditionType("acme.broken", {"type": "object"}, lambda o, r: CompiledCondition("acme.broken", Threshold("above", 1), Broken, "x"), help="x"))
"""
    (tmp_path / "acme.py").write_text(plugin)
    raised = 1 + plugin.splitlines().index('        raise ZeroDivisionError("boom")')
    (tmp_path / "acme.yaml").write_text("version: 1\nrules:\n  x: {metric: loss, when: {acme.broken: {}}}\n")
    csv(tmp_path / "run.csv", losses())
    code, out, _ = says("run.csv", "--rules", "acme.yaml", "-p", "acme.py")
    assert code == 5, "there was no other rule"
    assert "not judged  x: its condition acme.broken raised ZeroDivisionError: boom" in out
    assert f"acme.py:{raised}" in "".join(out.split())
    assert "internal error" not in out
    _, out, _ = says("run.csv", "--rules", "acme.yaml", "-p", "acme.py", "--format", "json")
    (report,) = json.loads(out)
    assert (report["rules"]["x"]["verdict"], report["internal_errors"]) == ("not judged", [])
    assert [(e["plugin"], e["error"]) for e in report["plugin_errors"]] == [("acme", "ZeroDivisionError: boom")]


def test_a_report_of_a_replay_has_the_keys_of_the_contract(says: Says, tmp_path: Path, repository: Path) -> None:
    csv(tmp_path / "run.csv", losses(bad=[(60, 9.0), (61, 9.0)]))
    _, out, _ = says("run.csv", "--format", "json")
    (report,) = json.loads(out)
    page = (repository / "docs/reference/report.md").read_text()
    undocumented = [key for key in report if f"`{key}`" not in page]
    assert undocumented == []
    keys: Any = report["alerts"][0]
    assert [key for key in keys if f"`{key}`" not in page] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_the_progress_bar_is_on_stderr_and_on_a_terminal_only(tmp_path: Path) -> None:
    import os
    import pty

    for i in range(6):
        csv(tmp_path / f"run{i}.csv", losses(60))
    words = ["replay", *(f"run{i}.csv" for i in range(6)), "--format", "json"]
    command = [sys.executable, "-c", f"import sys; from healthcheck.cli import main; sys.exit(main({words!r}))"]
    plain = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert plain.stderr == ""
    assert "replaying" in shown
    assert done.stdout == plain.stdout


def test_a_replay_writes_junit_with_a_suite_per_run(healthcheck_here, tmp_path) -> None:
    (tmp_path / "good.csv").write_text("step,loss\n" + "".join(f"{i},1.0\n" for i in range(1, 60)))
    (tmp_path / "bad.csv").write_text(
        "step,loss\n" + "".join(f"{i},{'nan' if i == 50 else 1.0}\n" for i in range(1, 60))
    )
    (tmp_path / "r.yaml").write_text(
        "version: 1\nrules: {loss-not-finite: {metric: loss, when: nonfinite, severity: error}}\n"
    )
    done = healthcheck_here("replay", "good.csv", "bad.csv", "--rules", "r.yaml", "--report", "junit=out.xml")
    assert done.returncode == 1, done.stderr
    import xml.etree.ElementTree as ET

    suites = {s.get("name"): s.get("failures") for s in ET.parse(tmp_path / "out.xml").getroot()}
    assert suites == {"good.csv": "0", "bad.csv": "1"}
    wrong = healthcheck_here("replay", "good.csv", "--report", "junti=out.xml")
    assert wrong.returncode == 4
    assert 'did you mean "junit"' in wrong.stderr
