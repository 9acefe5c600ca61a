"""One word for how a run ended, in every output, and never OK beside an alert that counts."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from healthcheck.cli import main
from healthcheck.reports.ci import job_summary, junit_xml
from healthcheck.reports.page import page_html

RULES = {
    "version": 1,
    "external": ["loss", "norm", "other"],
    "rules": {
        "note": {"metric": "loss", "when": {"above": 3}, "severity": "info"},
        "high": {"metric": "loss", "when": {"above": 5}, "severity": "warning", "explains": ["norm-high"]},
        "norm-high": {"metric": "norm", "when": {"above": 5}, "severity": "warning"},
        "worse": {"metric": "norm", "when": {"above": 50}, "severity": "error"},
        "other-low": {"metric": "other", "when": {"below": 0}, "severity": "warning"},
        "broken": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["stop"]},
    },
}
VALUES = [1.0, 1.0, 1.0, 1.0, 4.0, 7.0, 70.0]
WORDS = ("OK", "WARNED", "FAILED", "STOPPED", "NOT JUDGED", "INTERRUPTED", "SCRIPT FAILED", "INTERNAL ERROR")


@pytest.fixture(scope="module")
def sessions(helper: Callable[[str], ModuleType]) -> ModuleType:
    return helper("tests/unit/reports/sessions.py")


def word_of(line: str) -> str:
    """The verdict at the beginning of what follows ``healthcheck: ``."""
    text = line.partition("healthcheck: ")[2]
    word = next(word for word in sorted(WORDS, key=len, reverse=True) if text.startswith(word))
    number = re.match(rf"{word} (\d+)", text)
    return f"{word} {number[1]}" if number and word == "WARNED" else word


def draw(rng: random.Random) -> dict[str, Any]:
    """One run: what it feeds, and how it is watched."""
    steps, values = rng.randrange(1, 12), VALUES if rng.random() < 0.8 else [1.0, 4.0]
    loss: list[Any] = [rng.choice(values) for _ in range(steps)]
    if rng.random() < 0.2:
        loss[rng.randrange(steps)] = math.nan
    series: dict[str, list[Any]] = {"loss": loss, "norm": [rng.choice(values) for _ in range(steps)]}
    if rng.random() < 0.15:
        series = {"unknown": [1.0] * steps}
    elif rng.random() < 0.3:
        series["other"] = [rng.choice([1.0, -1.0]) for _ in range(steps)]
    settings: dict[str, Any] = {}
    if rng.random() < 0.3:
        settings["mode"] = "observe"
    if rng.random() < 0.4:
        settings["fail_on"] = rng.choice(["never", "warning", "error"])
    rules = {**RULES, "settings": settings}
    if rng.random() < 0.3:
        rules["mute"] = [{"rule": rng.choice(["high", "norm-high", "other-low"]), "reason": "known", "steps": "1..99"}]
    return {"series": series, "rules": rules, "accept": rng.random() < 0.3}


ACCEPTED = """\
version: 1
accepted:
  - {rule: high, reason: known since last year}
  - {rule: other-low, reason: known since last year}
"""


def counts(alert: dict[str, Any]) -> bool:
    return alert["severity"] != "info" and not alert.get("muted") and not alert.get("accepted")


@pytest.mark.parametrize("seed", range(40))
def test_all_outputs_say_the_same_word_and_none_says_ok_beside_an_alert(
    seed: int,
    sessions: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    spec = draw(random.Random(seed))
    (tmp_path / "healthcheck.yaml").write_text(json.dumps(spec["rules"]))
    if spec["accept"]:
        (tmp_path / "healthcheck-accepted.yaml").write_text(ACCEPTED)
    report = sessions.run(spec["series"], rules="healthcheck.yaml")
    console = [line for line in capfd.readouterr().err.splitlines() if line.startswith("healthcheck: ")]
    said = {"console": word_of(console[-1])}

    [suite] = ET.fromstring(junit_xml([report]))
    said["junit"] = {p.attrib["name"]: p.attrib["value"] for p in suite.iter("property")}["verdict"]
    badge = re.search(r'<h1>.*<span class="badge [a-z-]+">([^<]+)</span></h1>', page_html([report]))
    assert badge is not None
    said["page"] = badge[1]
    said["summary"] = word_of("healthcheck: " + job_summary([report]).splitlines()[2])
    assert main(["report"]) == 0
    said["report"] = word_of(next(x for x in capfd.readouterr().out.splitlines() if x.startswith("healthcheck: ")))
    code = main(["replay", "latest"])
    said["replay"] = word_of(next(x for x in capfd.readouterr().out.splitlines() if x.startswith("healthcheck: ")))
    assert code == report["exit_code"]

    assert len(set(said.values())) == 1, (said, report["alerts"])
    word = said["console"]
    assert word.partition(" ")[0].lower() == report["verdict"].partition(" ")[0]
    assert report["exit_reason"] == report["verdict"]
    if any(map(counts, report["alerts"])):
        assert word != "OK"
        assert word != "NOT JUDGED"
    else:
        assert word in ("OK", "NOT JUDGED")


def test_the_property_sees_every_word_that_rules_can_give(sessions: ModuleType) -> None:
    """Else the test above might run forty times over the same case."""
    found = set()
    for seed in range(40):
        spec = draw(random.Random(seed))
        found.add(sessions.run(spec["series"], rules=spec["rules"], console=False, record=False)["verdict"])
    assert found == {"ok", "warned", "failed", "stopped", "not judged"}


SCRIPT = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(20):
    x = torch.randn(16, 4)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 10 and sys.argv[1:] == ["raise"]:
        raise ValueError("the script's own")
    if step == 10 and sys.argv[1:] == ["interrupt"]:
        raise KeyboardInterrupt
"""


@pytest.mark.slow
@pytest.mark.parametrize(("how", "word", "code"), [("raise", "SCRIPT FAILED", 1), ("interrupt", "INTERRUPTED", 2)])
def test_a_replay_keeps_the_verdict_of_a_script_that_came_to_a_bad_end(
    how: str,
    word: str,
    code: int,
    healthcheck_warm: Callable[..., Any],
    healthcheck_here: Callable[..., Any],
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    result = healthcheck_warm("run", "train.py", how, cwd=tmp_path)
    closing = next(line for line in result.stderr.splitlines() if line.startswith("healthcheck: "))
    assert (word_of(closing), result.returncode) == (word, code)
    record = next(p for p in tmp_path.rglob("report.json") if not p.parent.is_symlink())
    replayed = healthcheck_here("replay", str(record.parent), cwd=tmp_path)
    closing = next(line for line in replayed.stdout.splitlines() if line.startswith("healthcheck: "))
    assert word_of(closing) == word
    assert replayed.returncode == 0, "the exit code of a replay is that of what was judged"


FUNCTIONAL = """
import sys
import torch
from torch.func import functional_call, grad_and_value
model = torch.nn.Linear(4, 1)
weights = {name: p.detach() for name, p in model.named_parameters()}
x = torch.randn(8, 4)
both = grad_and_value(lambda w: ((functional_call(model, w, (x,)) - x.sum(1, keepdim=True)) ** 2).mean())
watch = None
if sys.argv[1:]:
    import healthcheck
    watch = healthcheck.watch(model)
for step in range(5):
    gradients, loss = both(weights)
    weights = {name: w - 0.1 * gradients[name] for name, w in weights.items()}
    if watch is not None:
        watch.step(loss=loss)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "argv", "advice"),
    [
        (FUNCTIONAL, [], "torch.func computes gradients without backward(), which nobody sees"),
        (
            "import argparse, torch\nargparse.ArgumentParser().parse_args()\n",
            ["--help"],
            "the script only printed its help",
        ),
        ("import torch\n", [], "no optimizer stepped and no backward() ran in this process"),
    ],
)
def test_a_script_that_never_trains_ends_with_a_sentence_that_helps(
    script: str, argv: list[str], advice: str, healthcheck_warm: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    result = healthcheck_warm("run", "train.py", *argv, cwd=tmp_path)
    assert result.returncode == 5
    closing = [line.strip() for line in result.stderr.splitlines()]
    at = next(n for n, line in enumerate(closing) if line.startswith("healthcheck: NOT JUDGED"))
    assert advice in " ".join(closing[at + 1 :])


@pytest.mark.slow
def test_what_a_functional_loop_is_told_to_do_has_its_loss_judged(
    script_process: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(FUNCTIONAL)
    result = script_process("train.py", "watched", cwd=tmp_path)
    assert re.search(r"^healthcheck: OK, 5 steps", result.stderr, re.MULTILINE), result.stderr


@pytest.fixture
def script_process() -> Callable[..., Any]:
    import os
    import subprocess
    import sys

    def run(*argv: str, cwd: Path) -> Any:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HEALTHCHECK")}
        return subprocess.run(
            [sys.executable, *argv], cwd=cwd, env={**env, "COLUMNS": "80"}, capture_output=True, text=True, timeout=300
        )

    return run


def test_damaged_reasons_of_a_record_do_not_break_its_replay(
    sessions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path / "runs"))
    sessions.run({"loss": [1.0, 9.0]}, rules=RULES, console=False)
    record = (tmp_path / "runs" / "latest").resolve()
    report = json.loads((record / "report.json").read_text())
    report["rules"]["other-low"] = ["no", "object"]
    report["rules"]["norm-high"] = {"verdict": "not judged", "needs_steps": "many"}
    report["verdict"] = {"not": "a word"}
    copied = tmp_path / "copied"
    shutil.copytree(record, copied)
    (copied / "report.json").write_text(json.dumps(report))
    capfd.readouterr()
    assert main(["replay", str(copied), "--rules", str(copied / "rules.yaml")]) == 0
    assert "healthcheck: WARNED 1" in capfd.readouterr().out
