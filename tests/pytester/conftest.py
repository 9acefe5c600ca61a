"""Real pytest runs of the plugin, in a process of their own or inside this one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml  # noqa: F401  (before any run inside this process: its C part cannot be imported twice)

sys.path.insert(0, str(Path(__file__).parent))

from watched_toy import TOY, TOY_RULES

RULES = """\
version: 1
defaults:
  warmup: 20
rules:
  loss-not-finite:
    metric: loss
    when: nonfinite
    severity: error
    explains: [loss-spike]
    then: [evidence, stop]
  loss-spike:
    metric: loss
    when: {robust_z: {above: 8, window: 200}}
    for: 3
    then: [warn, evidence]
  memory-high:
    metric: memory.fraction
    when: {above: 0.90}
    recover: {below: 0.85}
    for: 3
    then: [cleanup]
  hang:
    metric: heartbeat
    when: {stale: 300s}
    severity: error
    then: [dump_stacks]
"""


HEAD = "healthcheck_tests: 1\nrules: [stability.yaml]\ntests:\n"

RunTests = Callable[..., pytest.RunResult]


@pytest.fixture
def hctest(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> RunTests:
    """``hctest(text, *options)``: runs pytest over ``stability.hctest.yaml`` holding these tests."""
    (pytester.path / "stability.yaml").write_text(RULES, encoding="utf-8")

    # Other plugins cost seconds per run; ours is loaded by module, whether or not it is installed.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(text: str, *options: str, name: str = "stability.hctest.yaml") -> pytest.RunResult:
        (pytester.path / name).write_text(HEAD + text, encoding="utf-8")
        return pytester.runpytest("--assert=plain", "-p", "healthcheck.pytesting.plugin", *options)

    return run


@pytest.fixture(scope="session")
def compiler_is_there() -> None:
    """Inner runs drop the modules that they import, and torch's compiler, which comes with the first optimizer, cannot
    be imported twice: it has to be there before.
    """
    torch = pytest.importorskip("torch")
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()


@pytest.fixture
def watched(compiler_is_there: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> RunTests:
    """``watched(tests, *options)``: runs pytest over the toy and these tests, beside ``rules.yaml``."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("HEALTHCHECK_RUNS", raising=False)
    pytester.makefile(".yaml", rules=TOY_RULES)

    def run(tests: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(test_toy=TOY + tests)
        return pytester.runpytest("--assert=plain", "-p", "healthcheck.pytesting.plugin", *options)

    return run
