"""``healthcheck doctor --fullgraph train.py`` and pytest's ``--healthcheck-fullgraph``: does it compile into one graph?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

MODEL = """
import torch
from torch import nn


class Gate(nn.Module):
    def forward(self, x):
        GATE
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.gate = Gate()

    def forward(self, x):
        return self.gate(self.inner(x))
"""
TRAIN = """
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for size in (4, 6, 4, 6):
    COMPILED(torch.randn(size, 8)).sum().backward()
    optimizer.step()
"""
BREAKS = "if x.sum() > 0: x = x * 2"
WHOLE = "x = torch.where(x.sum() > 0, x * 2, x)"


def script(gate: str, compiled: str = "torch.compile(model)") -> str:
    return MODEL.replace("GATE", gate) + TRAIN.replace("for size", f"called = {compiled}\nfor size").replace(
        "COMPILED", "called"
    )


def doctor(healthcheck_here: Any, tmp_path: Path, text: str) -> tuple[int, dict[str, Any]]:
    (tmp_path / "train.py").write_text(text)
    done = healthcheck_here("doctor", "--fullgraph", "--format", "json", "train.py")
    return done.returncode, json.loads(done.stdout)


def test_a_graph_break_and_a_recompilation_have_their_lines_and_what_to_change(
    healthcheck_here: Any, tmp_path: Path
) -> None:
    code, said = doctor(healthcheck_here, tmp_path, script(BREAKS))
    broken, again = said["findings"][0], said["findings"][-1]
    assert (code, said["problems"]) == (1, 1)
    assert "train.py:8 in forward (module gate, a Gate)" in broken["text"]
    assert "torch.where" in broken["advice"]
    assert (again["level"], again["topic"]) == ("note", "recompiled")
    assert "size mismatch" in again["text"]


@pytest.mark.slow
def test_after_the_change_it_is_one_graph_even_of_a_script_that_compiles_nothing(
    healthcheck_here: Any, tmp_path: Path
) -> None:
    code, said = doctor(healthcheck_here, tmp_path, script(WHOLE, "model"))
    assert (code, said["problems"]) == (0, 0)
    assert said["measured"]["chosen"] == "Net"
    assert "one graph each, over 3 steps" in said["findings"][0]["text"]


def test_fullgraph_without_a_script_says_what_to_write(healthcheck_here: Any) -> None:
    done = healthcheck_here("doctor", "--fullgraph")
    assert done.returncode == 4
    assert "healthcheck doctor --fullgraph train.py" in done.stderr


@pytest.mark.slow
def test_under_the_pytest_option_a_graph_break_fails_its_test_alone(pytester: pytest.Pytester) -> None:
    tests = "".join(
        f"def test_{name}(): torch.compile({name}.Net(), mode='max-autotune')(torch.ones(2, 8))\n"
        for name in ("broken", "whole")
    )
    pytester.makepyfile(broken=MODEL.replace("GATE", BREAKS), whole=MODEL.replace("GATE", WHOLE))
    pytester.makepyfile(test_it=f"import torch, broken, whole\n{tests}")
    result = pytester.runpytest_subprocess("--healthcheck-fullgraph", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*Data-dependent branching*"])
    result.stdout.fnmatch_lines(["*broken.py*, line 7, in forward*"])
