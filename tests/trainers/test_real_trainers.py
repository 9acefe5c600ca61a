"""The real packages' own training loops, with stubs for what needs an accelerator or a cluster.

Each test skips where its package cannot be imported; docs/explanation/tested-with.md says when they last ran.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from healthcheck.run import current

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STOP = {
    "version": 1,
    "rules": {
        "bad": {"metric": "grad_norm", "when": "nonfinite", "severity": "error", "then": ["stop"]},
        "loss": {"metric": "loss", "when": {"above": 1e9}},
    },
}
OPTIONS = {"rules": STOP, "console": False, "record": False}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert current.current() is None, "a test left a session open"


def real(module: str) -> Any:
    """A module of a real package; any failure to import it is a reason to skip, and says so."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        pytest.skip(f"{module} cannot be imported here: {type(error).__name__}: {error}")


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Model(torch.nn.Linear):
    """NaN at the update ``bad``, counted from 1."""

    def __init__(self, bad: int = 0) -> None:
        torch.manual_seed(0)
        super().__init__(3, 1)
        self.bad, self.seen = bad, 0

    def forward(self, x: Any) -> Any:
        self.seen += self.training
        loss = super().forward(x).square().mean()
        return loss * float("nan") if self.training and self.seen == self.bad else loss


# --------------------------------------------------------------------------- torchtitan


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("bad", [0, 3])
def test_torchtitan_s_own_train_and_train_step(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    titan = real("torchtitan.trainer")
    monkeypatch.setattr(titan.dist_utils, "set_pg_timeouts", lambda **given: None)  # asks the accelerator
    from healthcheck.trainers.torchtitan import HealthCheckTrainer

    class Watched(HealthCheckTrainer, titan.Trainer):  # type: ignore[misc, name-defined]
        healthcheck = OPTIONS

        def __init__(self) -> None:  # the real one builds a model on an accelerator
            pass

        def batch_generator(self, data: Any) -> Iterator[Any]:
            yield from data

        def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: Any) -> Any:
            loss = model(input_dict["input"])
            loss.backward()
            return loss

    model = Model(bad)
    saved: list[tuple[int, bool]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class Optimizers(list[Any]):
        def zero_grad(self, set_to_none: bool = True) -> None:
            self[0].zero_grad(set_to_none)

        def step(self) -> None:
            self[0].step()

    def save(curr_step: int, last_step: bool = False) -> bool:
        saved.append((curr_step, last_step))
        return last_step

    trainer: Any = Watched()
    profiler = SimpleNamespace(step=lambda: None)
    vars(trainer).update(
        config=SimpleNamespace(
            training=SimpleNamespace(steps=6, max_norm=1.0, disable_cuda_graphs=True),
            checkpoint=SimpleNamespace(load_step=-1),
            validator=SimpleNamespace(enable=False),
            profiler=SimpleNamespace(build=lambda **_: contextlib.nullcontext(profiler)),
            comm=SimpleNamespace(train_timeout_seconds=100),
            dump_folder="",
        ),
        step=0,
        ntokens_seen=0,
        device=torch.device("cpu"),
        model_parts=[model],
        optimizers=Optimizers([optimizer]),
        lr_schedulers=SimpleNamespace(schedulers=[], step=lambda: None, get_metrics=dict),
        metrics_processor=SimpleNamespace(should_log=lambda step: True, log=lambda *a, **k: None, close=lambda: None),
        checkpointer=SimpleNamespace(
            enable=True, load=lambda step: None, save=save, maybe_wait_for_staging=lambda: None, close=lambda: None
        ),
        parallel_dims=SimpleNamespace(
            dp_enabled=False, pp_enabled=False, ep_enabled=False, dp_cp_enabled=False, world_mesh=None,
            get_optional_mesh=lambda name: None, get_all_one_dimensional_meshes=dict,
        ),
        gradient_accumulation_steps=1,
        num_pipeline_parallel_microbatches=1,
        dataloader=[({"input": torch.ones(2, 3)}, torch.ones(2))] * 10,
        gc_handler=SimpleNamespace(run=lambda step: None),
    )  # fmt: skip
    trainer.train()
    assert trainer.step == (bad or 6)
    assert trainer.health.report["steps"] == (bad or 6)
    assert trainer.health.report["internal_errors"] == []
    assert bool(model.weight.isfinite().all())
    assert saved[-1] == (bad or 6, True)
    assert [step for step, _ in trainer.health.session.history("loss")] == list(range(1, (bad or 6) + 1))


# --------------------------------------------------------------------------- NeMo AutoModel


class Scheduler:
    """Stands for ``StepScheduler``, whose real one needs a loader of its own kind."""

    def __init__(self, steps: int) -> None:
        self.step, self.epoch, self.max_steps, self.sigterm_flag = 0, 0, steps, False

    def __iter__(self) -> Iterator[list[Any]]:
        while self.step < self.max_steps and not self.sigterm_flag:
            yield [{"x": torch.ones(2, 3)}]
            self.step += 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def epochs(self) -> Iterator[int]:
        yield 0

    @property
    def is_val_step(self) -> bool:
        return self.step % 2 == 1 and not self.sigterm_flag

    @property
    def is_ckpt_step(self) -> bool:
        return self.step + 1 >= self.max_steps or self.sigterm_flag

    is_remote_logging_step = False


@pytest.mark.parametrize("bad", [0, 3])
def test_automodel_s_own_train_validation_loop(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = real("nemo_automodel.recipes.llm.train_ft")
    from healthcheck.trainers.automodel import HealthCheckRecipe

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *given: None)
    sample = recipes.MetricsSample
    saved: list[int] = []
    logged: list[Any] = []

    class Watched(HealthCheckRecipe, recipes.TrainFinetuneRecipeForNextTokenPrediction):  # type: ignore[misc, name-defined]
        healthcheck = OPTIONS

        def __init__(self) -> None:  # the real one parses a configuration
            from healthcheck.trainers.automodel import HealthCheckCallback

            self.callbacks = (HealthCheckCallback(**OPTIONS),)
            self._validation_seen = {}

        def _make_progress_bar(self) -> None:
            return None

        def _enable_qat_if_delayed(self, step: int) -> None:
            return

        def _collect_moe_load_balance(self) -> None:
            return

        def _maybe_collect_garbage(self) -> None:
            return

        def _finalize_and_close_checkpointer(self) -> None:
            return

    class Step:
        """What of the recipe computes on an accelerator."""

        def _run_train_optim_step(self: Any, batches: list[Any], max_grad_norm: Any = None) -> Any:
            loss = model(batches[0]["x"])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            self.optimizer[0].step()
            self.optimizer[0].zero_grad()
            metrics = {"loss": loss.item(), "grad_norm": norm.item(), "lr": 0.01, "mem": 0.0, "tps": 1.0}
            metrics |= {"tps_per_gpu": 1.0, "num_tokens_per_step": 6, "num_label_tokens": 6}
            return sample(step=self.step_scheduler.step, epoch=0, metrics=metrics)

        def _run_validation_epoch(self: Any, loader: Any) -> Any:
            metrics = {"val_loss": 1.0, "lr": 0.01, "num_label_tokens": 6, "mem": 0.0}
            return sample(step=self.step_scheduler.step, epoch=0, metrics=metrics)

        def save_checkpoint(self: Any, epoch: int, step: int, *given: Any, **named: Any) -> None:
            saved.append(step)

    for name in ("_run_train_optim_step", "_run_validation_epoch", "save_checkpoint"):
        monkeypatch.setattr(recipes.TrainFinetuneRecipeForNextTokenPrediction, name, getattr(Step, name))
    model = Model(bad)
    logger = SimpleNamespace(log=logged.append, close=lambda: None)
    recipe: Any = Watched()
    vars(recipe).update(
        model_parts=[model],
        optimizer=[torch.optim.SGD(model.parameters(), lr=0.01)],
        lr_scheduler=None,
        step_scheduler=Scheduler(6),
        dist_env=SimpleNamespace(is_main=True, rank=0, world_size=1),
        val_dataloaders={"squad": [], "other": []},
        metric_logger_train=logger,
        metric_logger_valid={"squad": logger, "other": logger},
        comet_logger=None,
        checkpointer=SimpleNamespace(config=SimpleNamespace(enabled=True, checkpoint_dir="checkpoints")),
        best_metric_key="default",
        max_grad_norm=1.0,
        partial_cuda_graph_manager=None,
        _partial_cuda_graph_capture_pending=False,
    )
    recipe.run_train_validation_loop()
    last = bad or 6
    assert recipe.health.report["steps"] == last
    assert recipe.health.report["internal_errors"] == []
    assert bool(model.weight.isfinite().all())
    assert saved[-1] == last - 1
    assert [step for step, _ in recipe.health.session.history("loss")] == list(range(1, last + 1))
    assert any("healthcheck/alert/bad" in line.metrics for line in logged) is bool(bad)


# --------------------------------------------------------------------------- Dream Trainer


@pytest.fixture
def dream(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Version 0.3.0 as it is published, with two things that it expects and nobody publishes."""
    import sys
    import typing
    from types import ModuleType

    extensions = pytest.importorskip("typing_extensions")
    registry = ModuleType("registry")
    registry.Module = type("Module", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "registry", registry)
    monkeypatch.setattr(typing, "override", extensions.override, raising=False)
    real("dream_trainer.callbacks")
    return real("dream_trainer.trainer.base")


@pytest.mark.parametrize("bad", [0, 3])
def test_dream_trainer_s_own_fit(dream: Any, bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from dream_trainer.callbacks import CallbackCollection

    import healthcheck.trainers.dream as adapter

    if "dream_trainer" not in adapter.HealthCheckCallback.__mro__[2].__module__:
        adapter = importlib.reload(adapter)  # now with the package's own base class
    health = adapter.HealthCheckCallback(**OPTIONS)
    monkeypatch.setattr(dream.dist_ops, "global_agreement", lambda value: True)
    monkeypatch.setattr(dream, "seed_everything", lambda seed: None)
    model = Model(bad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    class Trainer(dream.BaseTrainer):  # type: ignore[misc, name-defined]
        train_dataloader = [torch.ones(2, 3)] * 6
        val_dataloader = [torch.ones(2, 3)] * 2

        def __init__(self) -> None:  # the real one launches a distributed world
            nothing: Any = lambda *given, **named: None  # noqa: E731
            self.world = SimpleNamespace(
                launch=nothing,
                barrier=nothing,
                set_pg_timeouts=nothing,
                train_context=contextlib.nullcontext,
                get_total_norm=lambda parameters, **_: torch.nn.utils.get_total_norm([p.grad for p in parameters]),
                device=torch.device("cpu"),
                dp_size=1,
                world_mesh=None,
                is_global_zero=True,
            )
            self.training_parameters = SimpleNamespace(n_epochs=2, val_every_n_steps=3, gradient_clip_val=None)
            self.global_step = self.current_epoch = self.local_batches = self._local_step = self.seed = 0
            self.is_sanity_validation = False
            self.callbacks = CallbackCollection([health])
            self.callbacks.initialize(self)

        def _setup_trainer_metadata(self) -> None:
            self._num_train_batches, self._num_gradient_accumulation_steps = 6, 1
            self._num_val_steps = self._num_sanity_val_steps = 2

        def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            loss = model(batch)
            self.backward(loss)
            return {"loss": loss, "grad_norm": self.step(optimizer)}

        def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
            return {"loss": model(batch)}

        def named_models(self) -> dict[str, Any]:
            return {"model": model}

        def named_optimizers(self) -> dict[str, Any]:
            return {"optimizer": optimizer}

        def get_name_by_optimizer(self, given: Any) -> str:
            return "optimizer"

        def get_model_by_optimizer(self, name: str) -> Any:
            return model

        def get_scheduler_from_optimizer(self, given: Any) -> None:
            return None

        def named_metrics(self) -> dict[str, Any]:
            return {}

        def train(self) -> None:
            model.train()

        def eval(self) -> None:
            model.eval()

        def configure(self) -> None:
            return

        setup = post_setup = pre_fit = post_fit = configure

        def pre_train_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

        pre_validation_step = pre_train_step

        def post_validation_epoch(self, result: Any) -> Any:
            return result

        def _validate_optimizer_parameters(self, given: Any) -> list[Any]:
            return list(model.parameters())

    Trainer.__abstractmethods__ = frozenset()
    trainer = Trainer()
    trainer.fit()
    last = bad or 12
    assert health.report["steps"] == last
    assert health.report["internal_errors"] == []
    assert bool(model.weight.isfinite().all())
    assert [step for step, _ in health.session.history("loss")] == list(range(1, last + 1))
    assert health.report["exit_code"] == (1 if bad else 0)
