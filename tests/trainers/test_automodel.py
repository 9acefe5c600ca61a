"""NeMo AutoModel: released recipes through a mixin, callbacks as its documentation describes them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import healthcheck
from healthcheck.trainers.automodel import (
    Callback,
    CallbackRecipe,
    HealthCheckCallback,
    HealthCheckRecipe,
    rank_zero_only,
)

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent / "drivers"))

import automodel_loop
import torch
from source_order import calls, real_files
from told import Model, batches

pytestmark = pytest.mark.usefixtures("nothing_left")
Recipe = automodel_loop.TrainFinetuneRecipeForNextTokenPrediction
FILES = real_files("nemo_automodel/recipes/llm/train_ft.py")
WATCH = {
    "version": 1,
    "rules": {
        "loss": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["stop"]},
        "norm": {"metric": "grad_norm", "when": {"above": 1e6}},
        "speed": {"metric": "tps", "when": {"below": 1}},
        "eval": {"metric": "eval.loss", "when": {"above": 1e6}},
    },
    "external": ["tps"],
}


class Watched(HealthCheckRecipe, Recipe):  # type: ignore[misc, valid-type]
    healthcheck: ClassVar[dict[str, Any]] = {"rules": WATCH, "console": False, "record": False}


def run(recipe_class: Any = Watched, model: Any = None, callbacks: Any = (), options: Any = None, **given: Any) -> Any:
    config = automodel_loop.config(model or Model(), batches(), **{"max_steps": 6, **given})
    more = {"callbacks": callbacks, **({"healthcheck": options} if options else {})}
    recipe = recipe_class(config, **more)
    recipe.setup()
    recipe.run_train_validation_loop()
    return recipe


def options(rules: dict[str, Any]) -> dict[str, Any]:
    return {"rules": {"version": 1, "rules": rules}, "console": False, "record": False}


def test_steps_are_counted_from_1_and_carry_what_the_recipe_measured() -> None:
    health = run(grad_acc_steps=2).health
    assert [step for step, _ in health.session.history("loss")] == [1, 2, 3, 4, 5, 6]
    assert health.session.history("tps") == [(step, 100.0) for step in range(1, 7)]
    assert health.report["trainer"] == "automodel"
    assert health.report["internal_errors"] == []
    assert health.exit_code == 0


def test_the_loss_of_accumulated_batches_is_the_recipe_s_own() -> None:
    recipe = run(grad_acc_steps=2)
    assert [v for _, v in recipe.health.session.history("loss")] == pytest.approx(
        [line["loss"] for line in recipe.metric_logger_train.lines]
    )


def test_a_stop_keeps_the_bad_update_out_and_saves_on_the_way_out(tmp_path: Path) -> None:
    recipe = run(model=Model(bad=3), checkpoint_dir=str(tmp_path))
    assert recipe.health.report["stop"]["step"] == 3
    assert recipe.cfg.model.seen == 3
    assert bool(recipe.cfg.model.weight.isfinite().all())
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_0_step_2"]


def test_validation_sets_are_told_apart_by_name() -> None:
    validation = {"squad": batches(2), "hellaswag": batches(3)}
    recipe = run(validation=validation, val_every_steps=3)
    names = {name for name in recipe.health.session.history.series() if name.startswith("eval.loss")}
    assert names == {"eval.loss[dataset=squad]", "eval.loss[dataset=hellaswag]"}
    assert [step for step, _ in recipe.health.session.history("eval.loss[dataset=squad]")] == [3, 6]


def test_checkpoints_carry_the_detectors_and_a_resume_goes_on(tmp_path: Path) -> None:
    run(checkpoint_dir=str(tmp_path), ckpt_every_steps=2, max_steps=4)
    state = tmp_path / "epoch_0_step_3" / "healthcheck-state.json"
    assert json.loads(state.read_text())["step"] == 4
    health = run(checkpoint_dir=str(tmp_path), start_step=4).health
    assert health.report["resumed_from"] == 4
    assert [step for step, _ in health.session.history("loss")] == [5, 6]
    assert not any("fresh" in note for note in health.session.info.notes)


def test_a_requested_checkpoint_is_written_once(tmp_path: Path) -> None:
    rules = {"any": {"metric": "lr", "when": {"above": 0}, "then": ["checkpoint"]}}
    health = run(checkpoint_dir=str(tmp_path), options=options(rules)).health
    assert health.alerts[0].actions[0].data["path"] == str(tmp_path / "epoch_0_step_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_0_step_0", "epoch_0_step_5"]


def test_a_checkpoint_cannot_be_had_where_they_are_off() -> None:
    rules = {"any": {"metric": "lr", "when": {"above": 0}, "then": ["checkpoint"]}}
    assert "checkpoint.enabled is off" in run(options=options(rules)).health.alerts[0].actions[0].text


def test_metrics_and_alerts_reach_the_recipe_s_own_log() -> None:
    rules = {"any": {"metric": "update_ratio", "when": {"above": 0}}}
    recipe = run(options=options(rules))
    lines = recipe.metric_logger_train.lines
    assert lines[0]["healthcheck/alert/any"] == 1.0
    assert lines[1]["healthcheck/update_ratio"] > 0


class Recorder(Callback):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
        self.heard.append("start")

    def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
        self.heard.append(("batch", kwargs["train_log_data"].step))

    def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
        self.heard.append(("validation", sorted(kwargs["val_results"])))

    def on_save_checkpoint(self, recipe: Any, **kwargs: Any) -> None:
        self.heard.append(("checkpoint", kwargs["checkpoint_info"]))

    def on_exception(self, recipe: Any, **kwargs: Any) -> None:
        self.heard.append(("exception", kwargs["exception"]))

    def on_train_end(self, recipe: Any, **kwargs: Any) -> None:
        self.heard.append("end")


class WithCallbacks(CallbackRecipe, Recipe):  # type: ignore[misc, valid-type]
    pass


@pytest.mark.parametrize("recipe", [WithCallbacks, Watched])
def test_callbacks_hear_the_documented_hooks_in_order_with_or_without_a_watch(recipe: Any, tmp_path: Path) -> None:
    heard = Recorder()
    given = {"validation": {"a": batches(1), "b": batches(1)}, "val_every_steps": 2}
    run(recipe, callbacks=[heard], max_steps=2, checkpoint_dir=str(tmp_path), ckpt_every_steps=2, **given)
    info = heard.heard.pop(4)[1]
    assert heard.heard == ["start", ("batch", 0), ("batch", 1), ("validation", ["a", "b"]), "end"]
    assert set(info) == {"epoch", "step", "train_loss", "val_losses", "checkpoint_path", "best_metric_key"}
    assert Path(info["checkpoint_path"]).is_dir()
    assert set(info["val_losses"]) == {"a", "b"}


@pytest.mark.parametrize("recipe", [WithCallbacks, Watched])
def test_an_exception_is_told_and_raised_again(recipe: Any) -> None:
    class Fails(Model):
        def forward(self, x: Any) -> Any:
            if self.seen == 2:
                raise ZeroDivisionError("on purpose")
            return super().forward(x)

    heard = Recorder()
    with pytest.raises(ZeroDivisionError):
        run(recipe, model=Fails(), callbacks=[heard])
    assert heard.heard[-1][0] == "exception"
    assert isinstance(heard.heard[-1][1], ZeroDivisionError)
    assert "end" not in heard.heard


def test_the_report_of_a_failed_run_names_the_exception() -> None:
    class Fails(Model):
        def forward(self, x: Any) -> Any:
            raise ZeroDivisionError("on purpose")

    recipe = Watched(automodel_loop.config(Fails(), batches()))
    recipe.setup()
    with pytest.raises(ZeroDivisionError):
        recipe.run_train_validation_loop()
    assert recipe.health.report["exit_reason"] == "script failed"


def test_a_recipe_that_calls_callbacks_itself_may_be_given_the_watch() -> None:
    """What the version that has callbacks will do; no mixin, no torch hooks needed beyond ours."""
    health = HealthCheckCallback(WATCH, console=False, record=False)
    model = Model()
    scheduler = SimpleNamespace(step=0, epoch=0, max_steps=3, sigterm_flag=False)
    recipe = SimpleNamespace(
        step_scheduler=scheduler,
        dist_env=SimpleNamespace(is_main=True, rank=0, world_size=1),
        model_parts=[model],
        optimizer=[torch.optim.SGD(model.parameters(), lr=0.1)],
    )
    health.on_train_start(recipe)
    for step in range(3):
        scheduler.step = step
        sample = automodel_loop.MetricsSample(step, 0, {"loss": 2.0 - step, "grad_norm": 1.0, "lr": 0.1})
        health.on_train_batch_end(recipe, train_log_data=sample)
    results = {"validation": automodel_loop.MetricsSample(2, 0, {"val_loss": 1.5})}
    health.on_validation_end(recipe, val_results=results)
    health.on_train_end(recipe)
    assert health.session.history("loss") == [(1, 2.0), (2, 1.0), (3, 0.0)]
    assert health.session.history("eval.loss[dataset=validation]") == [(3, 1.5)]
    assert health.report["steps"] == 3


def test_rank_zero_only_asks_the_recipe() -> None:
    class Main(Callback):
        def __init__(self) -> None:
            self.calls = 0

        @rank_zero_only
        def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
            self.calls += 1

    one, other = Main(), Main()
    run(callbacks=[one])
    run(callbacks=[other], is_main=False)
    assert (one.calls, other.calls) == (6, 0)


def test_a_plugin_s_error_does_not_end_the_training() -> None:
    class Broken(healthcheck.Callback):
        def on_step_end(self) -> None:
            raise RuntimeError("broken on purpose")

    health = run(options={**Watched.healthcheck, "callbacks": (Broken(),)}).health
    assert health.report["steps"] == 6
    assert health.report["plugin_errors"][0]["count"] == 3


LOOP = ("set_epoch", "_run_train_optim_step", "log_train_metrics", "_run_validation_epoch", "log_val_metrics")
LOOP = (*LOOP, "save_checkpoint", "train")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parents[3].name)
def test_the_driver_has_the_order_of_the_real_recipe(path: Path) -> None:
    theirs = calls(path, "run_train_validation_loop", LOOP)
    last = len(theirs) - 1 - theirs[::-1].index("log_val_metrics")
    del theirs[last]  # the weighted sum of a domain mixture, which the driver has not
    assert theirs == calls(Path(automodel_loop.__file__), "run_train_validation_loop", LOOP)
