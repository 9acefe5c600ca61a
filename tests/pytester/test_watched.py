"""Watched tests: real pytest runs over real torch training, as in a project of somebody else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from watched_toy import block

RunTests = Callable[..., pytest.RunResult]


def test_lr_100_fails_with_one_readable_block_and_lr_01_passes(watched: RunTests) -> None:
    result = watched(
        """
@pytest.mark.healthcheck(rules="rules.yaml")
@pytest.mark.parametrize("lr", [0.1, 100.0])
def test_train(lr):
    train(lr)
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    lines = block(result, "loss-not-finite at step ")
    text = "\n".join(lines)
    assert re.fullmatch(r"loss-not-finite at step \d+: loss is (nan|inf): it exploded, from .*", lines[0])
    for part in (
        r"  value     (nan|inf)",
        r"  normal    [\d.,e+]+, 1 step earlier",
        r"  try       lower the learning rate",
    ):
        assert re.search(part, text), part
    assert re.search(r"  rule      .*rules\.yaml:3 \(error\)", text)
    evidence = re.search(r"  evidence  (\S+)", text)
    assert evidence is not None
    assert (Path(evidence[1]) / "README").exists() or any(Path(evidence[1]).iterdir())
    assert len(lines) <= 11
    result.stdout.no_fnmatch_line("*Traceback*")
    result.stdout.no_fnmatch_line("*healthcheck/pytesting*")
    result.stdout.fnmatch_lines(["FAILED test_toy.py::test_train?100.0? - loss-not-finite at step *: loss is *"])


def test_a_test_that_trains_nothing_fails(watched: RunTests) -> None:
    """Green although nothing was looked at is the worst result."""
    result = watched("@pytest.mark.healthcheck(rules='rules.yaml')\ndef test_nothing(): pass\n")
    result.assert_outcomes(failed=1)
    assert block(result, "NOT JUDGED")[0] == "NOT JUDGED, no training step was seen"


def test_max_steps_ends_training_and_the_test_passes_if_it_was_healthy(watched: RunTests) -> None:
    result = watched(
        """
@pytest.mark.healthcheck(rules="rules.yaml", max_steps=5)
def test_short(healthcheck):
    train(steps=1_000_000)
""",
        "-rP",
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["training was ended as asked (asked for 5 steps); code of the test after it did not run"]
    )
    result.stdout.fnmatch_lines(["test_toy.py::test_short  OK * 5 steps"])


def test_after_a_limited_block_the_test_goes_on(watched: RunTests) -> None:
    watched(
        """
def test_goes_on(healthcheck):
    with healthcheck.limit(7):
        train(steps=1_000_000)
    assert healthcheck.steps == 7
    assert len(healthcheck.series("loss")) == 7
    assert [step for step, _ in healthcheck.history("loss")] == list(range(1, 8))
    assert healthcheck.alerts == []
    with pytest.raises(KeyError, match="metrics="):
        healthcheck.series("units.dead")
    with pytest.raises(KeyError, match='did you mean "loss"'):
        healthcheck.series("los")
"""
    ).assert_outcomes(passed=1)


def test_the_own_failure_of_a_test_comes_first_and_keeps_its_traceback(watched: RunTests) -> None:
    result = watched(
        """
@pytest.mark.healthcheck(rules="rules.yaml", fail_on="never", set=["loss-not-finite.then=[warn]"])
def test_mine():
    train(lr=100.0, steps=12)
    assert 1 == 2, "mine"
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E       AssertionError: mine", "*Captured healthcheck call*", "loss-not-finite at step *: loss is *"]
    )


@pytest.mark.slow
def test_skips_and_expected_failures_stay_what_they_are(watched: RunTests) -> None:
    watched(
        """
from healthcheck.testing import HealthCheckFailed

@pytest.mark.healthcheck(rules="rules.yaml")
def test_skip():
    pytest.skip("not today")

@pytest.mark.healthcheck(rules="rules.yaml")
@pytest.mark.xfail(raises=HealthCheckFailed, strict=True)
def test_known():
    train(lr=100.0)
"""
    ).assert_outcomes(skipped=1, xfailed=1)


def test_all_is_given_back_after_the_test(watched: RunTests) -> None:
    watched(
        """
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

def state():
    return torch.Tensor.backward, torch.autograd.backward, torch.optim.Optimizer.zero_grad, len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks), torch.save

BEFORE = state()

@pytest.mark.healthcheck(rules="rules.yaml")
def test_watched(inject):
    assert state() != BEFORE
    train()

def test_after():
    import healthcheck
    assert state() == BEFORE
    assert healthcheck.current() is None
"""
    ).assert_outcomes(passed=2)


@pytest.mark.slow
def test_one_session_inside_another_is_refused_in_one_sentence(watched: RunTests) -> None:
    result = watched(
        """
import healthcheck

def test_nested():
    with healthcheck.watch(rules="healthcheck:recommended", console=False, record=False):
        pass

@pytest.fixture
def around():
    with healthcheck.watch(rules="healthcheck:recommended", console=False, record=False) as health:
        yield health

@pytest.mark.healthcheck(rules="rules.yaml")
def test_inside(around):
    train()
"""
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["another session watches this process already (*); sessions cannot be nested"])
