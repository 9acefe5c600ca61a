"""A value that a script logs belongs to the step in which it is logged, whatever rules are on; ``why``, replay and live agree on it."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healthcheck.instrument.step_rows import LISTENED

pytestmark = pytest.mark.slow

HEAD = """
import torch, healthcheck
torch.manual_seed(0)
model = torch.nn.Linear(4, 1); optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
data = torch.utils.data.TensorDataset(torch.ones(400, 4))
log = lambda **metrics: healthcheck.log(**metrics)
"""
LOOPS = {
    "in a flat loop": """
        for (x,), i in zip(torch.utils.data.DataLoader(data, batch_size=8), range(1, 13)):
            log(a=float(i)); optimizer.zero_grad(); log(b=float(i))
            loss = model(x).pow(2).mean(); log(c=float(i))
            loss.backward(); log(d=float(i))
            optimizer.step(); log(e=float(i))
            healthcheck.log(f=float(i))
    """,
    "in a function that makes a step": """
        def train_step(x, i):
            log(a=float(i)); loss = model(x).pow(2).mean(); log(b=float(i))
            optimizer.zero_grad(); loss.backward(); log(c=float(i))
            optimizer.step(); log(d=float(i))
        for i in range(1, 13):
            log(e=float(i)); train_step(torch.ones(8, 4), i); log(f=float(i))
    """,
    "with two passes for one update, and in an evaluation": """
        for turn in range(24):
            i = turn // 2 + 1
            log(a=float(i)); loss = model(torch.ones(8, 4)).pow(2).mean(); log(b=float(i))
            loss.backward(); log(c=float(i))
            if turn % 2:
                optimizer.step(); optimizer.zero_grad(); log(d=float(i))
                if i % 4 == 0:
                    model.eval(); model(torch.ones(8, 4)).sum().item(); log(e=float(i)); model.train()
            log(f=float(i))
    """,
    "with the next batch drawn early, by a loader": """
        batches = iter(torch.utils.data.DataLoader(data, batch_size=8)); (x,) = next(batches)
        for i in range(1, 13):
            log(a=float(i)); loss = model(x).pow(2).mean(); log(b=float(i)); loss.backward(); log(c=float(i))
            optimizer.step(); optimizer.zero_grad(); log(d=float(i)); (x,) = next(batches); log(e=float(i))
    """,
    "with two optimizers, one of which steps seldom": """
        other = torch.nn.Linear(4, 1); seldom = torch.optim.SGD(other.parameters(), lr=1e-2)
        for i in range(1, 13):
            log(a=float(i)); model(torch.ones(8, 4)).pow(2).mean().backward(); log(b=float(i))
            optimizer.step(); optimizer.zero_grad(); log(c=float(i))
            if i % 3 == 0:
                other(torch.ones(8, 4)).pow(2).mean().backward(); log(d=float(i)); seldom.step(); log(e=float(i))
            log(f=float(i))
    """,
    "with watch() and its step at the end": """
        health = healthcheck.watch(model, optimizer, rules=RULES)
        for i in range(1, 13):
            log(a=float(i)); loss = model(torch.ones(8, 4)).pow(2).mean(); log(b=float(i))
            optimizer.zero_grad(); loss.backward(); log(c=float(i)); optimizer.step(); log(d=float(i))
            health.step(loss=loss); log(e=float(i))
        health.close()
    """,
}
OWN = "".join(f"  {name}: {{metric: {name}, when: {{above: 6.5}}}}\n" for name in "abcdef")
FILE = "version: 1\nexternal: [a, b, c, d, e, f]\nextends: [PACK]\nrules:\n" + OWN
RULES = {
    "alone": FILE.replace("PACK", ""),
    "beside others, one of which holds back updates": FILE.replace("PACK", "")
    + "  y: {metric: loss, when: {above: 1000}}\n  z: {metric: grad_norm, when: {above: 1000}, then: [skip_update]}\n",
    "beside the recommended ones": FILE.replace("PACK", "healthcheck:recommended"),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_values_belong_to_the_turn_of_the_loop_that_logs_them(
    loop: str, healthcheck_warm: Callable[..., Any], tmp_path: Path
) -> None:
    body = HEAD + textwrap.dedent(LOOPS[loop])
    (tmp_path / "train.py").write_text(body.replace("rules=RULES", "rules='rules.yaml'"))
    for rules, text in RULES.items():
        (tmp_path / "rules.yaml").write_text(text)
        runs = tmp_path / rules.replace(" ", "-")
        here = {"env": {"HEALTHCHECK_RUNS": str(runs)}}
        done = healthcheck_warm("run", "--rules", "rules.yaml", "train.py", **here)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in (runs / "latest" / "samples.jsonl").read_text().splitlines()]
        logged = [
            (row["step"], name, value) for row in rows for name, value in row.get("m", {}).items() if name in "abcdef"
        ]
        assert len(logged) >= 50
        assert {(step, name, value) for step, name, value in logged if step != value} == set(), rules
    healthcheck_warm("replay", "latest", "--rules", "rules.yaml", "--report", "json=replayed.json", **here)
    live = json.loads((runs / "latest" / "report.json").read_text())["alerts"]
    replayed = json.loads((tmp_path / "replayed.json").read_text())[0]["alerts"]
    fired = [
        sorted((a["rule"], a["fired_step"]) for a in alerts if a["rule"] in "abcdef") for alerts in (live, replayed)
    ]
    assert fired[0] == fired[1]
    assert {step for rule, step in fired[0]} <= {7, 8, 9}
    why = healthcheck_warm("why", "a", **here)
    assert "fired at step 7" in why.stdout


def test_a_script_that_begins_to_log_late_gives_its_first_value_to_the_step_before_and_no_other(
    healthcheck_warm: Callable[..., Any], tmp_path: Path
) -> None:
    """Until then nobody has looked up where in the script its updates are made."""
    first = LISTENED + 10
    body = f"""
        for i in range(1, {first + 31}):
            if i >= {first} and i % 10 == 0: log(a=float(i))
            optimizer.zero_grad(); model(torch.ones(8, 4)).pow(2).mean().backward(); optimizer.step()
            if i >= {first} and i % 10 == 0: log(b=float(i))
    """
    (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(body))
    (tmp_path / "rules.yaml").write_text(RULES["alone"])
    assert healthcheck_warm("run", "--rules", "rules.yaml", "train.py").returncode == 0
    lines = (tmp_path / "runs" / "latest" / "samples.jsonl").read_text().splitlines()
    logged = {(name, value): row["step"] for row in map(json.loads, lines) for name, value in row.get("m", {}).items()}
    steps = [first, first + 10, first + 20, first + 30]
    assert [logged["a", float(step)] for step in steps] == [first - 1, *steps[1:]]
    assert [logged["b", float(step)] for step in steps] == steps
