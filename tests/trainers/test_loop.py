"""``healthcheck.watch``: a loop of one's own, in a script or a notebook."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import healthcheck
from healthcheck.core.errors import RuleFileError, StopTraining, UsageError
from healthcheck.instrument.loop import Loop
from healthcheck.run import current

torch = pytest.importorskip("torch")

NAN_STOPS = {
    "version": 1,
    "external": ["kl"],
    "rules": {
        "grads": {"metric": "grad_nonfinite", "when": {"above": 0}, "severity": "error", "then": ["stop"]},
        "kl-high": {"metric": "kl", "when": {"above": 5}},
    },
}


LOSS_ONLY = {"version": 1, "rules": {"loss-high": {"metric": "loss", "when": {"above": 1e6}}}}


class Setup:
    """A tiny model, its optimizer, and a loop over them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def watch(self, rules: Any = NAN_STOPS, **given: Any) -> Loop:
        return healthcheck.watch(self.model, self.optimizer, rules=rules, console=False, record=False, **given)

    def update(self, *, bad: bool = False, clip: float | None = None) -> Any:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(4, 2) * (float("nan") if bad else 1.0)).square().mean()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        return loss

    @property
    def finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.model.parameters())

    @property
    def hooks(self) -> int:
        return len(self.optimizer._optimizer_step_pre_hooks) + len(self.optimizer._optimizer_step_post_hooks)


@pytest.fixture
def setup() -> Iterator[Setup]:
    yield Setup()
    assert current.current() is None, "a test left a loop open"


def test_a_loop_that_reads_should_stop_ends_itself_with_its_weights(setup: Setup) -> None:
    with setup.watch() as health:
        for i in range(10):
            loss = setup.update(bad=i == 3)
            health.step(loss=loss)
            if health.should_stop:
                break

    assert i == 3
    assert setup.finite
    assert [a.rule for a in health.alerts] == ["grads"]
    assert health.alerts[0].fired_step == 4
    assert health.exit_code == 1
    assert health.report is not None
    assert health.report["stop"]["rule"] == "grads"


def test_a_loop_that_does_not_look_gets_one_tidy_exception_at_its_next_step(setup: Setup) -> None:
    """And the update of that next step is not applied either."""
    seen = []

    def train() -> None:
        with setup.watch() as health:
            for i in range(10):
                loss = setup.update(bad=i == 3)
                seen.append(setup.model.weight.detach().clone())
                health.step(loss=loss)

    with pytest.raises(StopTraining) as caught:
        train()

    assert len(seen) == 5
    assert caught.value.rule == "grads"
    assert seen[3].equal(seen[2])
    assert seen[4].equal(seen[2])
    assert current.current() is None


def test_updates_after_the_stop_change_nothing(setup: Setup) -> None:
    with setup.watch() as health:
        health.step(loss=setup.update(bad=True))
        before = [p.detach().clone() for p in setup.model.parameters()]
        setup.update()

    assert all(a.equal(b) for a, b in zip(before, setup.model.parameters(), strict=True))
    assert setup.model.weight.grad is not None


def test_every_step_is_counted_once_and_has_its_loss(setup: Setup) -> None:
    with setup.watch(LOSS_ONLY) as health:
        losses = []
        for _ in range(4):
            loss = setup.update(clip=0.1)
            losses.append(loss.item())
            health.step(loss=loss, samples=4, tokens=8)

    assert [step for step, _ in health.history("loss")] == [1, 2, 3, 4]
    assert [value for _, value in health.history("loss")] == pytest.approx(losses)
    assert health.report is not None
    assert health.report["steps"] == 4


def test_the_gradient_norm_is_the_one_from_before_clipping(setup: Setup) -> None:
    rules = {"version": 1, "rules": {"g": {"metric": "grad_norm", "when": {"above": 1e9}}}}
    with setup.watch(rules) as health:
        setup.optimizer.zero_grad()
        loss = (setup.model(torch.ones(1, 2)) * 100).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(setup.model.parameters(), 0.5)
        setup.optimizer.step()
        health.step(loss=loss)

    assert health.history("grad_norm")[0][1] == pytest.approx(173.2, rel=1e-3)


def test_without_an_optimizer_the_loop_tells_what_it_knows() -> None:
    rules = {"version": 1, "external": ["kl"], "rules": {"kl-high": {"metric": "kl", "when": {"above": 5}}}}
    with healthcheck.watch(rules=rules, console=False, record=False) as health:
        for i in range(9):
            health.step(metrics={"kl": float(i)})

    assert [(a.rule, a.fired_step) for a in health.alerts] == [("kl-high", 7)]


def test_a_second_watch_of_the_same_model_replaces_the_first(setup: Setup) -> None:
    """A notebook cell that is run again must not pile up hooks."""
    first = setup.watch()
    hooks = setup.hooks
    second = setup.watch()

    assert setup.hooks == hooks > 0
    assert first.report is not None
    assert second.report is None
    second.close()
    assert setup.hooks == 0


def test_two_models_are_watched_side_by_side() -> None:
    one, two = Setup(), Setup()
    with one.watch() as first, two.watch() as second:
        first.step(loss=one.update())
        second.step(loss=two.update(bad=True))

    assert [a.rule for a in first.alerts] == []
    assert [a.rule for a in second.alerts] == ["grads"]


def test_ctrl_c_leaves_clean(setup: Setup) -> None:
    before = torch.nn.utils.clip_grad._clip_grads_with_norm_
    health = setup.watch()

    def train() -> None:
        with health:
            health.step(loss=setup.update())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()

    assert setup.hooks == 0
    assert torch.nn.utils.clip_grad._clip_grads_with_norm_ is before
    assert health.report is not None
    assert health.report["exit_reason"] == "interrupted"


def test_an_error_in_the_loop_is_reported_and_passes(setup: Setup) -> None:
    health = setup.watch()
    with pytest.raises(ZeroDivisionError), health:
        health.step(loss=1 / 0)

    assert health.report is not None
    assert health.report["exit_reason"] == "script failed"


def test_the_asked_number_of_steps_ends_the_block_without_an_error(setup: Setup) -> None:
    made = 0
    with setup.watch(LOSS_ONLY, max_steps=3) as health:
        for _ in range(10):
            health.step(loss=setup.update())
            made += 1

    assert made == 3
    assert health.exit_code == 0


def test_a_muted_rule_does_not_count(setup: Setup) -> None:
    with setup.watch(observe=True) as health, health.muted("kl-high", reason="planned"):
        health.step(loss=setup.update(), metrics={"kl": 9.0})

    assert [(a.rule, a.muted) for a in health.alerts] == [("kl-high", "planned")]
    assert health.exit_code == 0


def test_mistakes_in_rules_are_said_before_anything_is_attached(setup: Setup) -> None:
    with pytest.raises(RuleFileError) as caught:
        setup.watch({"version": 1, "rules": {"a": {"metric": "los", "when": {"abov": 1}}}})

    assert len(caught.value.problems) == 2
    assert setup.hooks == 0


def test_without_rules_nothing_is_attached(setup: Setup) -> None:
    before = torch.nn.utils.clip_grad._clip_grads_with_norm_
    with setup.watch({"version": 1, "rules": {}}) as health:
        assert setup.hooks == 0
        assert torch.nn.utils.clip_grad._clip_grads_with_norm_ is before
        health.step(loss=setup.update())
        assert health.should_stop is False


def test_the_off_switch_makes_everything_a_no_op(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEALTHCHECK", "off")
    with setup.watch() as health:
        health.step(loss=setup.update(bad=True))
        health.log(kl=9.0)
        with health.muted("x", reason="y"):
            pass

    assert setup.hooks == 0
    assert (health.should_stop, health.exit_code, health.alerts, health.history("loss")) == (False, 0, [], [])


def test_what_is_no_optimizer_is_refused(setup: Setup) -> None:
    with pytest.raises(UsageError, match="takes a torch optimizer, not a Linear"):
        healthcheck.watch(setup.model, setup.model, rules=NAN_STOPS)


def test_module_level_log_reaches_the_open_loop(setup: Setup) -> None:
    with setup.watch() as health:
        healthcheck.log(kl=9.0)
        health.step(loss=setup.update())

    assert [a.rule for a in health.alerts] == ["kl-high"]
    healthcheck.log(kl=9.0)  # nobody watches: nothing happens


def test_under_run_watch_joins_the_session_that_is_there(play: Callable) -> None:
    """Each step is counted once, and metrics given to the loop are judged by the run's rules."""
    played = play(
        """
        import torch, healthcheck
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with healthcheck.watch(model, optimizer) as health:
            for i in range(4):
                model(torch.ones(4, 2)).mean().backward()
                optimizer.step()
                health.step(loss=1.0, metrics={"kl": float(i * 2)})
        print(health.joined)
        """,
        rules=NAN_STOPS,
    )

    assert played.steps() == [1, 2, 3, 4]
    assert [a.rule for a in played.session.alerts] == ["kl-high"]


@pytest.mark.slow
def test_a_loop_in_a_plain_script_writes_its_report_even_without_close(
    script: Callable[..., Path], tmp_path: Path
) -> None:
    import json
    import os
    import subprocess
    import sys

    path = script(
        """
        import torch, healthcheck
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        health = healthcheck.watch(model, optimizer, reports={"json": "hc.json"})
        for i in range(4):
            model(torch.ones(4, 2)).mean().backward()
            optimizer.step()
            health.step(loss=1.0)
        """
    )
    environment = {**os.environ, "HEALTHCHECK_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}

    result = subprocess.run([sys.executable, path], cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    assert json.loads((tmp_path / "hc.json").read_text())["steps"] == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_of_a_watched_loop_has_the_functions_of_torch_and_its_steps_are_not_ours() -> None:
    setup = Setup()
    health = setup.watch(LOSS_ONLY)
    assert hasattr(torch.amp.GradScaler.step, "__wrapped__")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        said = b"replaced" if hasattr(torch.amp.GradScaler.step, "__wrapped__") else b"torch's own"
        setup.model(torch.ones(4, 2)).mean().backward()
        setup.optimizer.step()
        health.step(loss=1.0)
        os.write(writing, said + b", step %d" % health.session.step)
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    assert os.read(reading, 100) == b"torch's own, step 0"
    os.close(reading)
    assert hasattr(torch.amp.GradScaler.step, "__wrapped__")
    health.close()
    assert not hasattr(torch.amp.GradScaler.step, "__wrapped__")
