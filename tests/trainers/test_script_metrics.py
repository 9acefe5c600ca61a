"""Metrics that a script logs already become metrics of ours, under one name each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from healthcheck.core.names import canonical_metric

LOGS = """
    import sys
    sys.path.insert(0, {folder!r})
    import torch
    import wandb, mlflow
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = wandb.init()
    for i in range(3):
        model(torch.ones(4, 2)).mean().backward()
        optimizer.step()
        wandb.log({{"reward": i + 0.5, "train/loss": 99.0, "table": "text", "flag": True}})
        mlflow.log_metric("kl", 0.1 * i)
        mlflow.log_metrics({{"val_loss": 2.0 - i, "val/acc": torch.tensor(0.25)}}, step=i)
    print(wandb.seen, mlflow.seen)
"""


@pytest.fixture
def loggers(tmp_path: Path) -> Path:
    """Stand-ins with the shape of the real packages; those are not installed here."""
    (tmp_path / "wandb" / "sdk").mkdir(parents=True)
    (tmp_path / "wandb" / "sdk" / "__init__.py").write_text("")
    (tmp_path / "wandb" / "sdk" / "wandb_run.py").write_text(
        "class Run:\n    def log(self, data, step=None):\n        import wandb\n        wandb.seen += 1\n"
    )
    (tmp_path / "wandb" / "__init__.py").write_text(
        "seen = 0\n"
        "from wandb.sdk.wandb_run import Run\n"
        "def log(data, step=None):\n    raise RuntimeError('call init first')\n"
        "def init():\n    global log\n    run = Run()\n    log = run.log\n    return run\n"
    )
    (tmp_path / "mlflow.py").write_text(
        "seen = 0\n"
        "def log_metric(key, value, step=None):\n    global seen\n    seen += 1\n"
        "def log_metrics(metrics, step=None):\n    for k, v in metrics.items():\n        log_metric(k, v, step)\n"
    )
    return tmp_path


@pytest.fixture
def forget_loggers() -> Any:
    import sys

    yield
    for name in [n for n in sys.modules if n.split(".")[0] in ("wandb", "mlflow")]:
        del sys.modules[name]


def values(play: Callable, text: str, **given: Any) -> dict[str, list[float]]:
    return {name: [round(v, 3) for v in found] for name, found in play(text, **given).samples.items()}


@pytest.mark.usefixtures("forget_loggers")
def test_logged_metrics_are_taken_once_and_the_logger_still_gets_them(
    play: Callable, loggers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = values(play, LOGS.format(folder=str(loggers)))

    assert seen["reward"] == [0.5, 1.5, 2.5]
    assert seen["kl"] == [0.0, 0.1, 0.2]
    assert "table" not in seen
    assert "flag" not in seen
    assert capsys.readouterr().out == "3 9\n"


@pytest.mark.usefixtures("forget_loggers")
def test_evaluation_results_come_as_the_end_of_an_evaluation(play: Callable, loggers: Path) -> None:
    played = play(LOGS.format(folder=str(loggers)))

    ends = [(e.step, float(e.metrics["eval.loss"]), float(e.metrics["eval.accuracy"])) for e in played.of("eval_end")]
    assert ends == [(1, 2.0, 0.25), (2, 1.0, 0.25), (3, 0.0, 0.25)]


@pytest.mark.usefixtures("forget_loggers")
def test_a_logged_training_loss_does_not_mix_with_the_measured_one(play: Callable, loggers: Path) -> None:
    """Trackers are told averages, and sometimes filtered ones."""
    rules = {"version": 1, "rules": {"r": {"metric": "loss", "when": {"above": 1e9}}}}
    seen = values(play, LOGS.format(folder=str(loggers)), rules=rules)

    assert 99.0 not in seen["loss"]
    assert len(seen["loss"]) == 3


@pytest.mark.usefixtures("forget_loggers")
@pytest.mark.parametrize(("capture", "taken"), [("off", set()), (["rew*"], {"reward"}), (["eval.loss"], set())])
def test_capturing_can_be_narrowed_or_switched_off(
    play: Callable, loggers: Path, capture: Any, taken: set[str]
) -> None:
    seen = values(play, LOGS.format(folder=str(loggers)), settings={"capture": capture})

    assert {"reward", "kl"} & set(seen) == taken


@pytest.mark.slow
def test_a_script_that_only_evaluates_has_made_no_step(play: Callable) -> None:
    played = play(
        """
        import torch
        model = torch.nn.Linear(2, 1)
        for x in torch.utils.data.DataLoader([torch.ones(2)] * 8, batch_size=4):
            model(x)
        """,
        rules={"version": 1, "rules": {"loss": {"metric": "loss", "when": "nonfinite"}}},
    )
    assert played.session.report["steps"] == 0
    assert (played.code, played.session.report["exit_reason"]) == (5, "not judged")


def test_tensorboard_scalars_are_taken(play: Callable, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    played = play(
        f"""
        import torch
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter({str(tmp_path / "tb")!r})
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(2):
            model(torch.ones(4, 2)).mean().backward()
            optimizer.step()
            writer.add_scalar("Loss/val", 3.0 - i, i)
        writer.close()
        """
    )

    assert [float(e.metrics["eval.loss"]) for e in played.of("eval_end")] == [3.0, 2.0]


AGENT = """
    import sys
    sys.path.insert(0, {folder!r})
    import torch, wandb
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = wandb.init()
    for i in range(260):
        optimizer.zero_grad()
        (model(torch.randn(4, 2)) - 1).pow(2).mean().backward()
        optimizer.step()
        told = i if i < 200 or {healthy} else -100.0
        wandb.log({{"charts/episodic_return": told + torch.rand(()).item(), "eval/mean_reward": -1000.0 * i}})
"""


@pytest.mark.usefixtures("forget_loggers")
@pytest.mark.parametrize("healthy", [False, True])
def test_a_loop_that_logs_its_returns_gets_the_rules_on_rewards_without_asking(
    play: Callable, loggers: Path, healthy: bool
) -> None:
    played = play(AGENT.format(folder=str(loggers), healthy=healthy), rules="healthcheck:recommended")

    alerts = [a for a in played.session.alerts if a.rule.startswith(("reward-", "policy-"))]
    assert [a.rule for a in alerts] == ([] if healthy else ["reward-collapse"])
    if not healthy:
        assert 201 <= alerts[0].fired_step <= 230
        assert alerts[0].cleared_step is None


def test_what_stable_baselines_writes_is_heard_where_it_writes_it(play: Callable, tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3", reason="stable-baselines3 is not installed by make test")
    rules = {"version": 1, "external": ["reward", "kl"], "rules": {
        "reward": {"metric": "reward", "when": {"below": -1e9}}, "kl": {"metric": "kl", "when": {"above": 1e9}}}}  # fmt: skip
    seen = values(
        play,
        """
        from stable_baselines3 import PPO
        PPO("MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=1, device="cpu").learn(256)
        """,
        rules=rules,
    )
    assert len(seen["reward"]) >= 3
    assert all(value >= 1 for value in seen["reward"])
    assert len(seen["kl"]) >= 2


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("loss", "loss"),
        ("train/loss", "loss"),
        ("Train/Loss", "loss"),
        ("training_loss", "loss"),
        ("val_loss", "eval.loss"),
        ("eval/loss", "eval.loss"),
        ("loss/validation", "eval.loss"),
        ("valid-acc", "eval.accuracy"),
        ("Accuracy/val", "eval.accuracy"),
        ("test_loss", "test.loss"),
        ("train/learning_rate", "lr"),
        ("rewards/mean", "rewards.mean"),
        ("reward", "reward"),
        ("interval", "interval"),
        ("value_loss", "value_loss"),
        ("evaluation of nothing", "evaluation.of.nothing"),
    ],
)
def test_names_are_canonical(written: str, name: str) -> None:
    assert canonical_metric(written) == name
