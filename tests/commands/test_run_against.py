"""``healthcheck run --against RUN``: the proof that a fix works, or that it does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healthcheck.reports.against import compare

SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    optimizer.zero_grad()
    loss = (model(torch.ones(8, 4)) ** 2).mean() * (float("nan") if step == 20 and BROKEN else 1.0)
    loss.backward()
    optimizer.step()
"""


def reported(*alerts: tuple[str, str, int], steps: int = 100, **verdicts: str) -> dict[str, Any]:
    return {
        "steps": steps,
        "alerts": [{"rule": rule, "cause": cause, "fired_step": fired} for rule, cause, fired in alerts],
        "rules": {
            name.replace("_", "-"): {"verdict": verdict, "reason": "no data"} for name, verdict in verdicts.items()
        },
    }


def test_an_alert_that_does_not_come_back_is_gone_only_where_its_rule_was_judged_that_far() -> None:
    before = reported(("nan", "", 50), ("spike", "z", 90), ("hang", "", 10), ("idle", "", 5), ("leak", "", 60))
    now = reported(
        ("leak", "", 61), ("new-one", "", 7), steps=80, nan="ok", spike="ok", hang="not judged", leak="warned"
    )
    found = compare(before, now)
    assert [one["rule"] for one in found["gone"]] == ["nan"]
    assert [(one["rule"], one["now"]) for one in found["still"]] == [("leak", 61)]
    assert {one["rule"]: one["reason"] for one in found["unproven"]} == {
        "spike": "this run ended at step 80, before step 90",
        "hang": "it was not judged: no data",
        "idle": "the rule is not among those of this run",
    }
    assert [one["rule"] for one in found["new"]] == ["new-one"]


@pytest.mark.slow
def test_a_fix_is_proven_on_the_console_and_in_the_report(
    healthcheck_command: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(SCRIPT.replace("BROKEN", "True"))
    (tmp_path / "fixed.py").write_text(SCRIPT.replace("BROKEN", "False"))
    broken = healthcheck_command("run", "broken.py")
    assert broken.returncode == 1, broken.stderr
    fixed = healthcheck_command("run", "--against", "latest", "fixed.py")
    assert fixed.returncode == 0, fixed.stderr
    assert "gone, and judged: loss-not-finite (step 21), grads-not-finite: in-one-step (step 21)" in " ".join(
        fixed.stderr.split()
    )
    report = json.loads((tmp_path / "runs" / "latest" / "report.json").read_text())
    assert [one["rule"] for one in report["against"]["gone"]] == ["loss-not-finite", "grads-not-finite"]
    unknown = healthcheck_command("run", "--against", "nobody", "fixed.py")
    assert unknown.returncode == 4
