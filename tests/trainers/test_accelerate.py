"""Loops with an Accelerator: trackers, the trigger, save_state, and who counts the steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("torch")

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

import healthcheck

pytestmark = [pytest.mark.slow, pytest.mark.framework("accelerate"), pytest.mark.filterwarnings("ignore")]

RULES = {
    "version": 1,
    "rules": {
        "loss-not-finite": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["stop"]},
        "evaluations": {"metric": "eval.loss", "when": {"above": 1e9}},
    },
}
QUIET: dict[str, Any] = {"console": False, "record": False}


class Tracker(GeneralTracker):
    name = "list"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, Any]]] = []

    @property
    def tracker(self) -> Any:
        return self.rows

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.rows.append((step, dict(values)))


def prepared(accelerator: Any, n: int = 32) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.utils.data.TensorDataset(torch.randn(n, 4), torch.zeros(n, 1))
    return tuple(accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=2)))  # type: ignore[return-value]


def test_losses_of_an_accumulated_step_are_the_mean_of_its_parts() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, optimizer, data = prepared(accelerator)
    losses: list[float] = []
    with healthcheck.watch(rules=RULES, **QUIET) as health:
        health.attach(accelerator)
        for x, y in data:
            with accelerator.accumulate(model):
                loss = (model(x) - y).pow(2).mean()
                losses.append(loss.item())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    means = [sum(losses[i : i + 4]) / 4 for i in range(0, len(losses), 4)]
    assert [value for _, value in health.history("loss")] == pytest.approx(means)


def test_trackers_get_metrics_and_alerts_and_the_loops_evaluations_are_heard() -> None:
    tracker = Tracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("test")
    model, optimizer, data = prepared(accelerator, 12)
    rules = {**RULES, "rules": {**RULES["rules"], "low": {"metric": "loss", "when": {"above": 0}, "severity": "info"}}}  # type: ignore[dict-item]
    with healthcheck.watch(rules=rules, **QUIET) as health:
        health.attach(accelerator)
        for step, (x, y) in enumerate(data, start=1):
            loss = (model(x) - y).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"eval/loss": 1.0 / step}, step=step)
    names = {name for _, row in tracker.rows for name in row}
    assert {"healthcheck/loss", "healthcheck/alert/low", "eval/loss"} <= names
    assert health.history("eval.loss")[-1][1] == pytest.approx(1 / 6)


def test_a_loop_that_asks_for_the_trigger_ends_by_itself() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, data = prepared(accelerator)
    ended = 0
    with healthcheck.watch(rules=RULES, **QUIET) as health:
        health.attach(accelerator)
        for step, (x, y) in enumerate(data, start=1):
            loss = (model(x) - y).pow(2).mean() * (float("nan") if step == 5 else 1.0)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.check_trigger():
                ended = step
                break
    assert ended == 5
    assert bool(torch.isfinite(model.weight).all())
    assert health.report["stop"]["step"] == 5


def test_a_loop_that_asks_nobody_is_ended_by_the_next_step() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, data = prepared(accelerator)
    health = healthcheck.watch(rules=RULES, **QUIET)
    health.attach(accelerator)

    def train() -> None:
        with health:
            for step, (x, y) in enumerate(data, start=1):
                accelerator.backward((model(x) - y).pow(2).mean() * (float("nan") if step == 5 else 1.0))
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(healthcheck.StopTraining):
        train()
    assert bool(torch.isfinite(model.weight).all())
    assert health.report["steps"] == 6


def test_save_state_is_a_checkpoint_with_the_detectors_state(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, data = prepared(accelerator, 8)
    seen: list[tuple[int, str]] = []

    class Checkpoints(healthcheck.Callback):
        def on_save_checkpoint(self, event: Any) -> None:
            seen.append((event.step, event.path))

    with healthcheck.watch(rules=RULES, callbacks=[Checkpoints()], **QUIET) as health:
        health.attach(accelerator)
        for x, y in data:
            accelerator.backward((model(x) - y).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(str(tmp_path / "state"))
    assert seen == [(4, str(tmp_path / "state"))]
    assert (tmp_path / "state" / "healthcheck-state.json").is_file()


def test_everything_is_given_back_when_the_loop_is_closed() -> None:
    accelerator = Accelerator(cpu=True)
    before = accelerator.backward.__func__
    with healthcheck.watch(rules=RULES, **QUIET) as health:
        health.attach(accelerator)
        assert "backward" in vars(accelerator)
    assert "backward" not in vars(accelerator)
    assert accelerator.backward.__func__ is before


SCRIPT = """
    import torch
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(12, 4)), 2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for (x,) in data:
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_watched_script_is_counted_once(play: Callable[..., Any]) -> None:
    played = play(SCRIPT, rules=RULES)
    assert played.code == 0
    assert played.steps() == [1, 2, 3, 4, 5, 6]
    assert played.steps("loss") == [1, 2, 3, 4, 5, 6]
    assert played.session.report["trainer"] == "accelerate"
