"""The examples of NeMo AutoModel's page on callbacks, and its use cases.

The examples differ from the page in their imports only: ``nemo_automodel.components.callbacks``, which
no release has, is ours; the recipe is the driver's, which takes callbacks through our mixin.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import healthcheck
from healthcheck.run import current
from healthcheck.trainers.automodel import Callback, CallbackRecipe, HealthCheckRecipe, rank_zero_only

sys.path.insert(0, str(Path(__file__).parent / "drivers"))

torch = pytest.importorskip("torch")
automodel_loop: Any = pytest.importorskip("automodel_loop")
Released = automodel_loop.TrainFinetuneRecipeForNextTokenPrediction


class TrainFinetuneRecipeForNextTokenPrediction(CallbackRecipe, Released):  # type: ignore[misc, valid-type]
    pass


class Watched(HealthCheckRecipe, Released):  # type: ignore[misc, valid-type]
    healthcheck: ClassVar[dict[str, Any]] = {
        "rules": {
            "version": 1,
            "external": ["reward"],
            "rules": {
                "loss-high": {"metric": "loss", "when": {"above": 0}},
                "reward-low": {"metric": "reward", "when": {"below": 0.5}},
            },
        },
        "console": False,
        "record": False,
    }


RECIPES = [TrainFinetuneRecipeForNextTokenPrediction, Watched]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert current.current() is None, "a test left a session open"


class Model(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        return {"loss": super().forward(x).square().mean()}


@pytest.fixture
def cfg(tmp_path: Path) -> Any:
    batches = [{"x": torch.ones(2, 3)}] * 10
    return automodel_loop.config(
        Model(3, 1),
        batches,
        max_steps=4,
        validation={"validation": batches[:2]},
        val_every_steps=2,
        checkpoint_dir=str(tmp_path),
        ckpt_every_steps=2,
    )


# --------------------------------------------------------------------------- the page's own callbacks


class MetricsReporterCallback(Callback):
    """Report metrics to external API."""

    def on_train_batch_end(self, recipe, **kwargs):  # type: ignore[no-untyped-def]
        train_log_data = kwargs["train_log_data"]
        step = train_log_data.step
        loss = train_log_data.metrics["loss"]

        # Send to your API, database, or monitoring system
        print(f"Step {step}: Loss = {loss:.4f}")

    def on_validation_end(self, recipe, **kwargs):  # type: ignore[no-untyped-def]
        val_results = kwargs["val_results"]

        # val_results is a dict: {"validation": MetricsSample, ...}
        for name, log_data in val_results.items():
            val_loss = log_data.metrics["val_loss"]
            print(f"Validation '{name}': Loss = {val_loss:.4f}")

    def on_save_checkpoint(self, recipe, **kwargs):  # type: ignore[no-untyped-def]
        checkpoint_info = kwargs["checkpoint_info"]
        print(f"Checkpoint saved: {checkpoint_info['checkpoint_path']}")


class CustomizerCallback(Callback):
    posted: list[Any] = []  # noqa: RUF012

    @rank_zero_only
    def on_validation_end(self, recipe, **kwargs):  # type: ignore[no-untyped-def]
        # This only runs on rank 0
        val_results = kwargs["val_results"]
        self.posted.append(val_results)


class ManualRankCheck(Callback):
    saved: list[int] = []  # noqa: RUF012

    def on_train_batch_end(self, recipe, **kwargs):  # type: ignore[no-untyped-def]
        # Check if main rank before doing expensive operations
        if recipe.dist_env.is_main:
            self.saved.append(kwargs["train_log_data"].step)


@pytest.mark.parametrize("recipe_class", RECIPES)
def test_the_quick_example(recipe_class: Any, cfg: Any, capsys: pytest.CaptureFixture[str]) -> None:
    metrics_callback = MetricsReporterCallback()
    recipe = recipe_class(cfg, callbacks=[metrics_callback])
    recipe.setup()
    recipe.run_train_validation_loop()
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said if line.startswith("Step")] == ["Step 0", "Step 1", "Step 2", "Step 3"]
    assert sum(line.startswith("Validation 'validation': Loss = ") for line in said) == 2
    assert sum(line.startswith("Checkpoint saved: ") for line in said) == 2


@pytest.mark.parametrize("recipe_class", RECIPES)
@pytest.mark.parametrize("is_main", [True, False])
def test_the_decorator_and_the_manual_check_keep_to_the_main_rank(recipe_class: Any, cfg: Any, is_main: bool) -> None:
    cfg.is_main = is_main
    CustomizerCallback.posted.clear()
    ManualRankCheck.saved.clear()
    recipe = recipe_class(cfg, callbacks=[CustomizerCallback(), ManualRankCheck()])
    recipe.setup()
    recipe.run_train_validation_loop()
    assert len(CustomizerCallback.posted) == (2 if is_main else 0)
    assert ManualRankCheck.saved == ([0, 1, 2, 3] if is_main else [])


# --------------------------------------------------------------------------- its use cases, in our words


@pytest.fixture
def service() -> Iterator[tuple[str, list[Any]]]:
    """An HTTP service on this machine: its address, and what was posted to it."""
    posted: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/alerts", posted
    server.shutdown()
    thread.join()
    server.server_close()


class Reporter(healthcheck.Callback):
    """Alerts and milestones to a service."""

    def __init__(self, address: str) -> None:
        self.address = address

    def post(self, what: dict[str, Any]) -> None:
        request = urllib.request.Request(self.address, json.dumps(what).encode(), {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=120).close()

    def on_alert(self, alert: Any) -> None:
        self.post({"rule": alert.rule, "step": alert.fired_step})

    def on_step_end(self, event: Any) -> None:
        if event.step * 2 == event.max_steps:
            self.post({"progress": "half of the run"})

    def on_train_end(self, session: Any) -> None:
        self.post({"done": session.step})


def run(recipe: Any) -> Any:
    recipe.setup()
    recipe.run_train_validation_loop()
    return recipe.health


def test_alerts_progress_and_the_end_are_reported_to_a_service(cfg: Any, service: tuple[str, list[Any]]) -> None:
    address, posted = service
    health = run(Watched(cfg, healthcheck={**Watched.healthcheck, "callbacks": (Reporter(address),)}))
    assert posted == [{"rule": "loss-high", "step": 1}, {"progress": "half of the run"}, {"done": 4}]
    assert health.report["plugin_errors"] == []


def test_a_service_that_is_down_costs_the_reporter_and_not_the_training(cfg: Any) -> None:
    health = run(Watched(cfg, healthcheck={**Watched.healthcheck, "callbacks": (Reporter("http://127.0.0.1:9/x"),)}))
    assert health.report["steps"] == 4
    assert health.report["plugin_errors"]


class Rewards(Callback):
    """Metrics of one's own, from a documented callback into our rules."""

    def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
        healthcheck.log(reward=1.0 - 0.3 * kwargs["train_log_data"].step)


def test_custom_metrics_are_judged_by_rules(cfg: Any) -> None:
    health = run(Watched(cfg, callbacks=[Rewards()]))
    alert = next(a for a in health.alerts if a.rule == "reward-low")
    assert alert.value == pytest.approx(0.4)
    assert [value for _, value in health.session.history("reward")] == pytest.approx([1.0, 0.7, 0.4, 0.1])


def test_failures_are_notified(cfg: Any, service: tuple[str, list[Any]]) -> None:
    address, posted = service

    class Failures(healthcheck.Callback):
        def on_exception(self, event: Any) -> None:
            Reporter(address).post({"failed": str(event.exception)})

    class Fails(Model):
        def forward(self, x: Any) -> Any:
            raise ZeroDivisionError("out of luck")

    cfg.model = Fails(3, 1)
    with pytest.raises(ZeroDivisionError):
        run(Watched(cfg, healthcheck={**Watched.healthcheck, "callbacks": (Failures(),)}))
    assert posted == [{"failed": "out of luck"}]
