"""Injector x rule: a fault in a healthy training sets off the rule that promises to see it, and no other one."""

from __future__ import annotations

import gc
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from healthcheck.assembly import open_session
from healthcheck.faults.machine import rehearsal
from healthcheck.faults.spec import KINDS, parse_fault
from healthcheck.instrument.script import ScriptTrainer
from healthcheck.rulelang.loader import load_file

pytestmark = pytest.mark.usefixtures("compiler_imported")

TABLE: dict[str, dict[str, Any]] = load_file(Path(__file__).with_name("injectors.yaml")).data
QUICK = {"nan-loss", "nan-grad", "nan-weight", "nan-input", "no-zero-grad in ci", "lr-zero in ci"}

TOY = """
    import sys, torch
    torch.manual_seed(0)
    steps = int(sys.argv[1])
    x = torch.randn(1024, 8)
    y = x @ torch.randn(8, 1) + 0.5 * torch.randn(1024, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=128, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled="--amp" in sys.argv, init_scale=1024.0)
    done = 0
    while done < steps:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = ((model(inputs) - targets) ** 2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            done += 1
            if done == steps:
                break
"""


def play(folder: Path, entry: dict[str, Any], *, fault: str | None) -> dict[str, Any]:
    """The toy under the recommended pack, with or without the fault; returns its report."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(TOY))
    at = parse_fault(entry["at"])
    gc.collect()
    session = open_session(
        target="train.py",
        rules=["healthcheck:recommended", {"version": 1, "rules": entry.get("rules", {})}],
        profile=entry.get("profile"),
        console=False,
        record=False,
    )
    steps = at.first + entry["within"] + 10
    with rehearsal(session, [at] if fault else []):
        ScriptTrainer(session).run(str(script), [str(steps), *entry.get("script", [])])
    assert session.report is not None
    assert session.report["internal_errors"] == []
    return session.report


def alerts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the training. That steps took longer for a while, an info, may be said of any busy machine."""
    return [a for a in report["alerts"] if not (a["severity"] == "info" and "throughput" in a["tags"])]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in TABLE])
def test_the_first_unexplained_alert_is_the_promised_one(name: str, tmp_path: Path) -> None:
    entry = TABLE[name]
    report = play(tmp_path, entry, fault=entry["at"])
    [injected] = report["injected"]
    assert injected["happened"], "the fault never came about"
    told = [(a["rule"], a["fired_step"], a.get("explained_by", "")) for a in alerts(report)]
    named = {(a["rule"], a.get("cause", "")) for a in alerts(report)}
    wanted, _, cause = entry["rule"].partition(".")
    unexplained = [(rule, step) for rule, step, by in told if not by]
    assert unexplained, f"no alert at all; {report['rules'][wanted]}"
    rule, step = unexplained[0]
    assert rule == wanted, told
    assert (wanted, cause) in named, named
    assert -entry.get("before", 0) <= step - injected["step"] <= entry["within"], told
    assert {other for other, _ in unexplained} == {rule}, told


@pytest.mark.slow
@pytest.mark.parametrize("profile", [None, "ci"])
def test_without_a_fault_the_toy_raises_no_alert(profile: str | None, tmp_path: Path) -> None:
    entry = {"at": "spike@150", "within": 150, "profile": profile}
    assert [a["rule"] for a in alerts(play(tmp_path, entry, fault=None))] == []


def test_every_injector_has_its_rule() -> None:
    assert {parse_fault(entry["at"]).kind for entry in TABLE.values()} == set(KINDS)
