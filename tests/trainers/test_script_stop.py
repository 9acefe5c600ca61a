"""A stop ends the run, keeps the bad update away, and cannot be escaped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STOP_ON_NAN = {
    "version": 1,
    "rules": {
        "grads-not-finite": {"metric": "grad_nonfinite", "when": {"above": 0}, "severity": "error", "then": ["stop"]}
    },
}

GOES_NAN = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.{optimizer}
    for i in range(8):
        x = torch.ones(4, 2) * (float("nan") if i == 4 else 1.0)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("optimizer", ["SGD(model.parameters(), lr=0.1, momentum=0.9)", "AdamW(model.parameters())"])
def test_the_update_of_the_bad_step_is_not_applied(play: Callable, optimizer: str) -> None:
    weights: list[Any] = []

    played = play(
        GOES_NAN.format(optimizer=optimizer),
        rules=STOP_ON_NAN,
        on={"before_update": lambda s, e: weights.append([p.detach().clone() for _, p in e.model.named_parameters()])},
    )

    assert played.code == 1
    assert played.session.stop.request is not None
    assert (played.session.stop.request.rule, played.session.stop.request.step) == ("grads-not-finite", 5)
    assert "after_update" not in played.kinds(5)
    assert all(p.isfinite().all() for p in weights[-1])


def test_skipping_an_update_leaves_weights_and_optimizer_as_they_were(play: Callable) -> None:
    """And the gradients are back afterwards, for scripts that look at them."""
    states: dict[str, Any] = {}

    def state(event: Any) -> dict[str, Any]:
        parameters = [p for _, p in event.model.named_parameters()]
        moments = [v.clone() for s in event.optimizer.state.values() for v in s.values()]
        return {
            "weights": [p.detach().clone() for p in parameters],
            "moments": moments,
            "gradients": [p.grad is not None for p in parameters],
        }

    def before(session: Any, event: Any) -> None:
        if event.step == 3:
            states["before"] = state(event)
            assert session.controls.skip_update() is True

    def after(session: Any, event: Any) -> None:
        assert session.controls.skip_update() is False
        if event.step == 3:
            states["after"] = state(event)

    played = play(
        GOES_NAN.format(optimizer="AdamW(model.parameters())").replace("i == 4", "False"),
        on={"before_update": before, "step_end": after},
    )

    assert played.steps() == list(range(1, 9))
    for key in ("weights", "moments"):
        assert all(a.equal(b) for a, b in zip(states["before"][key], states["after"][key], strict=True))
        assert states["before"][key]
    assert states["after"]["gradients"] == [True, True]


def test_max_steps_ends_a_healthy_run_with_0(play: Callable) -> None:
    rules = {"version": 1, "rules": {"loss-high": {"metric": "loss", "when": {"above": 1e9}}}}
    played = play(
        GOES_NAN.format(optimizer="AdamW(model.parameters())").replace("i == 4", "False"),
        rules=rules,
        settings={"max_steps": 3},
    )

    assert played.steps() == [1, 2, 3]
    assert played.code == 0
    assert played.session.report is not None
    assert played.session.report["steps"] == 3


def test_a_script_that_swallows_the_stop_is_ended_and_its_report_is_written(play: Callable) -> None:
    """`except BaseException` round the step: three more chances, none of which updates anything."""
    played = play(
        """
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(100):
            try:
                optimizer.zero_grad()
                model(torch.ones(4, 2) * (float("nan") if i == 1 else 1.0)).square().mean().backward()
                optimizer.step()
            except BaseException:
                pass
        """,
        rules=STOP_ON_NAN,
    )

    assert played.left == [1]
    assert played.session.report is not None
    assert played.session.report["stop"]["rule"] == "grads-not-finite"
    assert played.steps("after_update") == [1]


def test_an_exception_raised_while_the_stop_passes_does_not_hide_it(play: Callable) -> None:
    played = play(
        """
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            for i in range(5):
                model(torch.ones(4, 2) * float("nan")).mean().backward()
                optimizer.step()
        except BaseException as error:
            raise RuntimeError("training failed") from error
        """,
        rules=STOP_ON_NAN,
    )

    assert played.code == 1
    assert played.session.report is not None
    assert played.session.report["exit_reason"] == "stopped"


def test_a_stop_in_a_training_thread_ends_the_run_without_a_traceback(
    play: Callable, capfd: pytest.CaptureFixture[str]
) -> None:
    played = play(
        """
        import threading, torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        def work():
            for i in range(5):
                model(torch.ones(4, 2) * (float("nan") if i == 2 else 1.0)).mean().backward()
                optimizer.step()
        threading.Thread(target=work).start()
        """,
        rules=STOP_ON_NAN,
    )

    assert played.code == 1
    assert played.steps("after_update") == [1, 2]
    assert "Traceback" not in capfd.readouterr().err


def test_observe_mode_goes_on_to_the_end(play: Callable) -> None:
    played = play(
        GOES_NAN.format(optimizer="SGD(model.parameters(), lr=0.1)"), rules=STOP_ON_NAN, settings={"mode": "observe"}
    )

    assert played.steps()[-1] == 8
    assert played.code == 0
    assert [a.rule for a in played.session.alerts] == ["grads-not-finite"]


def test_a_checkpoint_of_ours_holds_what_is_trained_and_overwrites_nothing(play: Callable, tmp_path: Path) -> None:
    import torch

    from healthcheck.core.errors import UsageError

    path = tmp_path / "ours.pt"
    seen: list[str] = []

    def save(session: Any, event: Any) -> None:
        if event.step == 2:
            assert session.controls.request_checkpoint(path) == str(path)
        if event.step == 3:
            with pytest.raises(UsageError, match="exists already"):
                session.controls.request_checkpoint(path)
            seen.append("refused")

    played = play(
        GOES_NAN.format(optimizer="AdamW(model.parameters())").replace("i == 4", "False"), on={"step_end": save}
    )

    content = torch.load(path, weights_only=True)
    assert content["step"] == 2
    assert sorted(content["modules"][0]) == ["bias", "weight"]
    assert seen == ["refused"]
    assert played.of("checkpoint_saved") == []


def test_scaling_the_learning_rate_changes_every_group(play: Callable) -> None:
    rates: list[float] = []

    def scale(session: Any, event: Any) -> None:
        if event.step == 2:
            rates.extend(session.controls.scale_lr(0.5))
        rates.append(event.optimizer.param_groups[0]["lr"])

    play(
        GOES_NAN.format(optimizer="SGD(model.parameters(), lr=0.1)").replace("i == 4", "False"), on={"step_end": scale}
    )

    assert rates[:4] == [0.1, 0.05, 0.05, 0.05]


@pytest.mark.slow
def test_a_swallowed_stop_ends_a_real_process(
    healthcheck_command: Callable, script: Callable[[str], Path], tmp_path: Path
) -> None:
    path = script(
        """
        import atexit, torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(100):
            try:
                model(torch.ones(4, 2) * float("nan")).mean().backward()
                optimizer.step()
            except BaseException:
                print("swallowed", flush=True)
        print("reached the end")
        """
    )

    result = healthcheck_command("run", "--report", f"json={tmp_path / 'hc.json'}", path)

    assert result.returncode == 1
    assert result.stdout.splitlines() == ["swallowed"] * 3
    assert json.loads((tmp_path / "hc.json").read_text())["exit_reason"] == "stopped"
