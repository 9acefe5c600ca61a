"""``healthcheck plan``: what would happen, told without running anything."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healthcheck.cli import main

RULES = """
version: 1
external: [reward]
metrics:
  gap: eval.loss - ewma(loss, 50)
rules:
  loss-not-finite: {metric: loss, when: nonfinite, severity: error, then: [stop]}
  spike: {metric: loss, when: {robust_z: {above: 8, window: 200}}, min_samples: 32, for: 3}
  late: {metric: loss, when: {above: 9}, warmup: 100}
  patient: {metric: loss, when: {above: 9}, for: 25}
  rare: {metric: "grad_norm[*]", when: {below: 1e-9}, every: 10}
  gap-high: {metric: gap, when: {above: 1}, required: true}
  reward-low: {metric: reward, when: {below: 0}}
  across-ranks: {metric: lr, when: {above: 1}, only_if: {amp.skipped: 0}}
"""

ESCAPE = re.compile(r"\\x1b\[[0-9;]*m")  # as it leaves for what is no terminal


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "healthcheck.yaml").write_text(RULES)
    (tmp_path / "train.py").write_text("raise SystemExit('plan must not run me')\n")

    def call(*argv: str) -> Any:
        capsys.readouterr()
        assert main(["plan", *argv]) == 0, capsys.readouterr().err
        out = capsys.readouterr().out
        return json.loads(out) if "json" in argv else out

    return call


def rules(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {rule["rule"]: rule for rule in made["rules"]}


def test_it_names_the_rules_that_may_stop_the_run(plan: Callable[..., Any]) -> None:
    assert "may stop the run: loss-not-finite\n" in plan("train.py")
    found = rules(plan("--format", "json"))
    assert [name for name, rule in found.items() if rule["may_stop"]] == ["loss-not-finite"]


def test_in_observe_mode_nothing_may_stop(plan: Callable[..., Any]) -> None:
    assert "may stop the run: none (observe mode)" in plan("--observe")


def test_it_follows_derived_metrics_to_their_probes(plan: Callable[..., Any]) -> None:
    made = plan("--format", "json")
    assert {"loss", "eval.loss", "grad_norm[]", "lr", "amp.skipped"} <= set(made["metrics"])
    assert made["metrics"]["grad_norm[]"] == 10
    assert "gradients" in made["probes"]
    assert set(made["derived"]) == {"gap"}
    assert made["logged_by_script"] == ["reward"]


def test_what_depends_on_the_script_is_said_and_not_decided(plan: Callable[..., Any]) -> None:
    found = rules(plan("--format", "json"))
    assert (found["gap-high"]["here"], found["gap-high"]["reason"]) == ("judged", None)
    assert found["gap-high"]["depends_on"] == "only with evaluations"
    assert found["across-ranks"]["depends_on"] is None, "a guard without samples counts as satisfied"


def test_max_steps_tells_which_windows_cannot_fill(plan: Callable[..., Any]) -> None:
    found = {name: rule["reason"] for name, rule in rules(plan("--max-steps", "20", "--format", "json")).items()}
    assert found["spike"] == "needs 32 samples first"
    assert found["late"] == "warms up for 100 steps"
    assert found["patient"] == "cannot fire before step 25"
    assert found["loss-not-finite"] is None
    long = rules(plan("--max-steps", "2000", "--format", "json"))
    assert [name for name, rule in long.items() if rule["here"] != "judged"] == []


@pytest.mark.parametrize("steps", [10, 24, 25, 32, 33, 34, 35, 36, 101, 102])
def test_the_forecast_agrees_with_the_engine(steps: int, plan: Callable[..., Any]) -> None:
    """A rule that plan calls unable to fire must not fire, and the others must, on values that always breach."""
    from healthcheck.assembly import load_rules_for, plugin_host
    from healthcheck.core.samples import Sample
    from healthcheck.engine.engine import Engine

    ruleset = load_rules_for(host=plugin_host(), only=["spike", "late", "patient"])
    engine = Engine(ruleset)
    for step in range(1, steps + 1):
        value = 10.0 if step % 2 else 10.1
        engine.evaluate(step, [Sample("loss", step, 10.0 * 3**step if step > 32 else value)], float(step))
    fired = {alert.rule for alert in engine.alerts}
    blocked = {
        n
        for n, r in rules(
            plan(
                "--max-steps", str(steps), "--only", "spike", "--only", "late", "--only", "patient", "--format", "json"
            )
        ).items()
        if r["here"] == "not judged"
    }
    assert fired == {"spike", "late", "patient"} - blocked


def test_a_machine_without_a_gpu_cannot_judge_gpu_rules(
    plan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from healthcheck.reports import planned

    monkeypatch.setattr(planned, "_has_gpu", lambda: False)
    assert planned.missing_here("cuda") == "no GPU"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert planned.missing_here("ranks") == ""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "2 or more ranks" in planned.missing_here("ranks")


def test_what_does_not_apply_is_kept_apart_from_what_cannot_be_judged(
    plan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from healthcheck.reports import planned

    monkeypatch.setattr(planned, "_has_gpu", lambda: False)
    made = plan("--rules", "healthcheck:performance", "--max-steps", "20", "--format", "json")
    found = rules(made)
    fragmentation = found["memory-allocator.fragmentation"]
    assert (fragmentation["here"], fragmentation["reason"]) == ("does not apply", "no GPU")
    growing = found["slow-steps.growing"]
    assert growing["here"] == "not judged"
    assert growing["remedy"] == "more than 20 steps"
    text = plan("--rules", "healthcheck:performance", "--max-steps", "20")
    assert (
        "  no GPU: memory-allocator.retries, memory-allocator.fragmentation"
        in text.partition("do not apply here: 2 of ")[2]
    )


def test_a_rule_of_your_own_applies_even_where_it_cannot_be_judged(
    tmp_path: Path, plan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from healthcheck.reports import planned

    monkeypatch.setattr(planned, "_has_gpu", lambda: False)
    (tmp_path / "healthcheck.yaml").write_text(
        "version: 1\nrules: {mine: {metric: memory.retries, when: {above: 3}}}\n"
    )
    found = rules(plan("--format", "json"))["mine"]
    assert (found["here"], found["reason"]) == ("not judged", "no GPU")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_line_is_wider_than_the_terminal(
    columns: int, plan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("healthcheck.reports.tables._is_terminal", lambda: True)
    text = plan("--rules", "healthcheck:recommended", "--max-steps", "20")
    assert max(map(len, ESCAPE.sub("", text).splitlines())) <= columns


def test_a_script_that_does_not_exist_is_a_usage_error(
    plan: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "trian.py"]) == 4
    assert "no such script: trian.py" in capsys.readouterr().err


def test_a_broken_rule_file_exits_4_with_all_its_mistakes(
    tmp_path: Path, plan: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "healthcheck.yaml").write_text(
        "version: 1\nrules:\n  a: {metric: los, when: {above: 1}}\n  b: {metric: loss, whn: {above: 1}}\n"
    )
    assert main(["plan"]) == 4
    err = capsys.readouterr().err
    assert "healthcheck.yaml:3" in err
    assert "healthcheck.yaml:4" in err
