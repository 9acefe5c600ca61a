"""``--sweep`` and ``--against``: finding a threshold, and seeing what a change of the rules does."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from healthcheck.cli import main

RULES = """
version: 1
rules:
  loss-high: {metric: loss, when: {above: 5}, for: 2}
  loss-nan: {metric: loss, when: nonfinite, severity: error}
  low: {metric: throughput, when: {below: 10}}
"""

Says = Callable[..., tuple[int, str, str]]


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Says:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "healthcheck.yaml").write_text(RULES)

    def call(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["replay", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def write(path: Path, peaks: list[float], *, column: str = "loss", usual: float = 2.0) -> Path:
    """A run of 60 rows whose values from row 31 on are ``peaks``."""
    noise = random.Random(1)
    values = [usual + noise.random() * 0.1 for _ in range(60)]
    values[30 : 30 + len(peaks)] = peaks
    path.write_text(f"step,{column}\n" + "".join(f"{i},{v}\n" for i, v in enumerate(values, 1)))
    return path


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Good runs peak at 3 and 6 (two samples running), the bad one at 20 and longer."""
    return [
        write(tmp_path / "good1.csv", [3.0, 3.0]),
        write(tmp_path / "good2.csv", [6.0, 6.5, 40.0]),
        write(tmp_path / "lone.csv", [50.0]),
        write(tmp_path / "bad.csv", [4.5, 9.0, 20.0, 30.0]),
    ]


def test_a_sweep_counts_good_and_bad_runs_for_each_value(says: Says, runs: list[Path]) -> None:
    code, out, _ = says("good*.csv", "lone.csv", "--sweep", "loss-high.when.above=2.5,5,10,25", "--bad", "bad.csv")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0
    assert rows[0][0] == "4"
    assert rows[1][0] == "above"
    assert rows[2:6] == [
        ["2.5", "2", "1", "0", "steps"],
        ["5", "now", "1", "1", "1", "step"],
        ["10", "0", "1", "2", "steps"],
        ["25", "0", "0", "-"],
    ]


def test_a_mistake_in_a_sweep_is_named_by_the_option_that_was_typed(says: Says, runs: list[Path]) -> None:
    code, _, err = says("good*.csv", "--sweep", "loss-high.fro=2", "--bad", "bad.csv")

    assert code == 4
    assert "--sweep loss-high.fro=2" in err
    assert "--set" not in err


def test_a_sweep_names_the_closest_good_run_with_the_value_that_its_for_would_have_needed(
    says: Says, runs: list[Path]
) -> None:
    """One sample at 50 is no two in a row: the critical value of a run respects ``for``."""
    _, out, _ = says("good*.csv", "lone.csv", "--sweep", "loss-high.when.above=5,10", "--bad", "bad.csv")
    assert "closest good run peaks at 6.50 (good2.csv, step 33)" in out
    assert "weakest bad run peaks at 20 (bad.csv)" in out
    assert "any value between 6.50 and 20 tells these runs apart" in out
    assert "loss-high: {when: {above: 10}}" in out


def test_the_critical_value_is_where_the_rule_stops_firing(says: Says, runs: list[Path]) -> None:
    _, out, _ = says("good2.csv", "--sweep", "loss-high.when.above=5", "--format", "json")
    critical = json.loads(out)["runs"][0]["critical"]
    for threshold, fires in ((critical - 0.001, True), (critical + 0.001, False)):
        _, out, _ = says("good2.csv", "--set", f"loss-high.when.above={threshold}", "--format", "json")
        assert bool(json.loads(out)[0]["alerts"]) is fires


def test_a_sweep_of_a_lower_bound_looks_downwards(says: Says, tmp_path: Path) -> None:
    write(tmp_path / "good.csv", [12.0], column="throughput", usual=100.0)
    write(tmp_path / "bad.csv", [3.0], column="throughput", usual=100.0)
    _, out, _ = says("good.csv", "--sweep", "low.when.below=5,10,20", "--bad", "bad.csv")
    assert "closest good run falls to 12" in out
    assert "any value between 3 and 12 tells these runs apart" in out


def test_a_bad_run_that_lies_in_the_folder_of_good_ones_counts_once(
    says: Says, runs: list[Path], tmp_path: Path
) -> None:
    _, out, _ = says(tmp_path, "--sweep", "loss-high.when.above=5", "--bad", "bad.csv", "--format", "json")
    assert [run["bad"] for run in json.loads(out)["runs"]] == [True, False, False, False]


def test_overlapping_runs_are_not_told_apart_by_any_value(says: Says, tmp_path: Path) -> None:
    write(tmp_path / "good.csv", [9.0, 9.0])
    write(tmp_path / "bad.csv", [6.0, 6.0])
    _, out, _ = says("good.csv", "--sweep", "loss-high.when.above=5,7", "--bad", "bad.csv")
    assert "no value tells these good runs from these bad ones" in out


def test_a_key_that_is_no_threshold_can_be_swept_too(says: Says, runs: list[Path]) -> None:
    _, out, _ = says("lone.csv", "good2.csv", "--sweep", "loss-high.for=1,2,3", "--format", "json")
    assert [run["fired_steps"] for run in json.loads(out)["runs"]] == [[31, None, None], [31, 32, 33]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("loss-high", "takes RULE.KEY=VALUES"),
        ("loss-hihg.when.above=1,2", 'did you mean "loss-high"'),
        ("loss-high.when.abvoe=1", "abvoe"),
        ("loss-high.when.above=1,many", "many"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused_before_a_run_is_read(
    says: Says, runs: list[Path], text: str, problem: str
) -> None:
    code, out, err = says("good1.csv", "--sweep", text)
    assert (code, out) == (4, "")
    assert problem in err


def test_an_unreadable_run_is_named_and_the_sweep_goes_on(says: Says, runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "noise.bin").write_bytes(b"\x00" * 100)
    code, out, err = says("good*.csv", "noise.bin", "--sweep", "loss-high.when.above=5")
    assert code == 4
    assert "noise.bin" in err
    assert out.startswith("2 runs, 120 rows (1 unreadable")


def test_against_shows_only_what_changes(says: Says, runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(RULES.replace("above: 5", "above: 10"))
    code, out, _ = says("*.csv", "--against", "old.yaml")
    assert code == 0
    assert out.splitlines() == [
        "loss-high",
        "  ~ bad.csv: fires at step 33 (warning), was step 34 (warning)",
        "  + good2.csv: now fires at step 32 (warning)",
        "2 runs of 4 change: 1 more, 1 changed",
    ]


def test_against_the_same_rules_there_is_no_difference(says: Says, runs: list[Path]) -> None:
    assert says("*.csv", "--against", "healthcheck.yaml")[1] == "no difference on 4 runs\n"


def test_a_rule_that_is_no_longer_judged_is_a_difference(says: Says, runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(RULES)
    _, out, _ = says("good1.csv", "--set", "loss-high.warmup=1000", "--against", "old.yaml")
    assert "- good1.csv: no longer judged: still warming up" in out


def test_against_a_revision_of_git(says: Says, runs: list[Path], tmp_path: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True, capture_output=True
        )

    (tmp_path / "base.yaml").write_text(RULES.replace("above: 5", "above: 10"))
    (tmp_path / "healthcheck.yaml").write_text("version: 1\nextends: [base.yaml]\nrules: {}\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "rules")
    (tmp_path / "healthcheck.yaml").write_text(RULES)
    (tmp_path / "base.yaml").unlink()
    _, out, _ = says("good2.csv", "--against", "HEAD:healthcheck.yaml")
    assert "+ good2.csv: now fires at step 32" in out
    assert "there is no nothing.yaml in HEAD" in says("good2.csv", "--against", "HEAD:nothing.yaml")[2]
    assert says("good2.csv", "--against", "HAED:healthcheck.yaml")[0] == 4


def test_a_sweep_without_a_bad_run_suggests_nothing(says: Says, runs: list[Path]) -> None:
    _, out, _ = says("good*.csv", "--sweep", "loss-high.when.above=5,10")
    assert "suggested:" not in out
    assert "healthcheck.yaml" not in out
    assert "--bad" in out


def test_a_value_that_fires_in_no_bad_run_is_not_suggested(says: Says, runs: list[Path]) -> None:
    _, out, _ = says("good*.csv", "--sweep", "loss-high.when.above=60,70", "--bad", "bad.csv")
    assert "suggested:" not in out
    assert "none of these values tells bad runs from good ones" in out


def test_a_value_that_fires_everywhere_is_not_suggested(says: Says, tmp_path: Path) -> None:
    write(tmp_path / "good.csv", [9.0, 9.0])
    write(tmp_path / "bad.csv", [6.0, 6.0])
    _, out, _ = says("good.csv", "--sweep", "loss-high.when.above=5", "--bad", "bad.csv")
    assert "suggested:" not in out


def test_runs_are_not_called_apart_where_one_bad_run_was_never_judged(
    says: Says, runs: list[Path], tmp_path: Path
) -> None:
    write(tmp_path / "other.csv", [], column="throughput")
    _, out, _ = says("good*.csv", "--sweep", "loss-high.when.above=5,10", "--bad", "bad.csv", "--bad", "other.csv")
    assert "tells these runs apart" not in out
    assert "weakest bad run peaks at 20 (bad.csv)" in out
    assert "suggested: 10 (fires in 1 of 2 bad runs, 0 of 2 good)" in out


def test_runs_are_not_called_apart_where_a_mute_hides_the_bad_one(says: Says, runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "healthcheck.yaml").write_text(
        RULES + 'mute:\n  - {rule: loss-high, steps: 1-60, reason: "known"}\n', encoding="utf-8"
    )
    _, out, _ = says("good1.csv", "--sweep", "loss-high.when.above=5,10", "--bad", "bad.csv")
    assert "tells these runs apart" not in out
    assert "suggested:" not in out


def test_a_for_in_seconds_leaves_no_single_value_between_the_runs(says: Says, runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "healthcheck.yaml").write_text(RULES.replace("for: 2", "for: 10s"), encoding="utf-8")
    _, out, _ = says("good1.csv", "--sweep", "loss-high.when.above=5,10", "--bad", "bad.csv")
    assert "apart" not in out
    assert "peaks at" not in out


CAUSES = """
version: 1
rules:
  loss-bad:
    causes:
      high: {metric: loss, when: {above: 5}, for: 2}
      low: {metric: loss, when: {below: 4}}
"""


@pytest.mark.parametrize("key", ["causes.high.when.above", "high.when.above"])
def test_a_sweep_is_of_one_cause_whatever_the_others_find(
    says: Says, runs: list[Path], tmp_path: Path, key: str
) -> None:
    (tmp_path / "healthcheck.yaml").write_text(CAUSES)
    code, out, _ = says("good*.csv", "--sweep", f"loss-bad.{key}=5,10", "--bad", "bad.csv")
    assert code == 0
    assert [line.split()[:4] for line in out.splitlines()[2:4]] == [["5", "now", "1", "1"], ["10", "0", "1", "1"]]
    assert "weakest bad run peaks at 20" in out
    assert "loss-bad: {causes: {high: {when: {above: 10}}}}" in out


def test_a_sweep_of_a_rule_with_causes_asks_for_one(says: Says, runs: list[Path], tmp_path: Path) -> None:
    (tmp_path / "healthcheck.yaml").write_text(CAUSES)
    code, _, err = says("good*.csv", "--sweep", "loss-bad.when.above=5,10", "--bad", "bad.csv")
    assert code == 4
    assert "--sweep takes loss-bad.CAUSE.KEY=VALUES here; the causes are high, low" in err
