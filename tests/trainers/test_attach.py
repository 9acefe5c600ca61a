"""``attach`` knows the objects of every trainer, and ``healthcheck run`` finds them in a script by itself."""

from __future__ import annotations

import gc
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

pytest.importorskip("torch")

import torch

import healthcheck
from healthcheck.trainers.native import mix_in

sys.path.insert(0, str(Path(__file__).with_name("drivers")))

import automodel_loop
import dream_loop
import megatron_loop
import titan_loop
from told import Model, batches

RULES: dict[str, Any] = {
    "version": 1,
    "rules": {"loss-not-finite": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["stop"]}},
}
BAD, STEPS = 5, 9

pytestmark = pytest.mark.usefixtures("nothing_left")


def megatron(attach: Callable[[Any], Any]) -> tuple[Any, Any, int]:
    model = Model(BAD)
    config = megatron_loop.config(
        train={"train_iters": STEPS}, model={"chunks": [model]}, dataset={"batches": batches()}
    )
    manager = megatron_loop.CallbackManager()
    health = attach(manager)
    state = megatron_loop.pretrain(config, lambda batch, parts: parts[0](**batch)["loss"], callbacks=manager)
    return manager, health, state.train_state.step


def automodel(attach: Callable[[Any], Any]) -> tuple[Any, Any, int]:
    recipe = automodel_loop.TrainFinetuneRecipeForNextTokenPrediction(
        automodel_loop.config(Model(BAD), batches(), max_steps=STEPS)
    )
    health = attach(recipe)
    recipe.setup()
    recipe.run_train_validation_loop()
    return recipe, health, recipe.model_parts[0].seen


def dream(attach: Callable[[Any], Any]) -> tuple[Any, Any, int]:
    trainer = dream_loop.Trainer(Model(BAD), batches(), dream_loop.CallbackCollection())
    health = attach(trainer)
    trainer.fit()
    return trainer, health, trainer.global_step


def torchtitan(attach: Callable[[Any], Any]) -> tuple[Any, Any, int]:
    trainer = titan_loop.Trainer(Model(BAD), batches(), steps=STEPS)
    health = attach(trainer)
    trainer.train()
    return trainer, health, trainer.step


TRAINERS = [megatron, automodel, dream, torchtitan]


@pytest.mark.parametrize("train", TRAINERS)
def test_a_trainer_that_exists_already_is_watched_by_the_loop_s_session(train: Any) -> None:
    with healthcheck.watch(rules=RULES, console=False, record=False) as health:
        target, adapter, steps = train(health.attach)
        assert health.attach(target) is adapter  # once is enough
    report = health.report
    assert (report["trainer"], report["stop"]["rule"], report["stop"]["step"]) == (
        adapter.watch.capabilities.trainer, "loss-not-finite", BAD,
    )  # fmt: skip
    assert report["steps"] == steps == BAD


@pytest.mark.parametrize("base", [object, Protocol])
def test_methods_mixed_into_an_object_come_first_whatever_its_class_inherits_from(base: Any) -> None:
    class Interface(base):  # type: ignore[misc]  # torchtitan's Trainer inherits from a protocol
        def step(self) -> str:
            return "interface"

    class Trainer(Interface):
        def __init__(self) -> None:
            self.kept = 1

        def step(self) -> str:
            return "own"

    class Base:
        def step(self) -> str:
            return "base, then " + super().step()  # type: ignore[misc]

    class Mixin(Base):
        def step(self) -> str:
            return "mixin, then " + super().step()

    target, other = Trainer(), Trainer()
    for _ in range(2):
        mix_in(Mixin, target)
    assert (target.step(), target.kept, other.step()) == ("mixin, then base, then own", 1, "own")
    assert isinstance(target, Mixin)
    assert isinstance(target, Trainer)
    assert type(target).__name__ == "Trainer"


@pytest.mark.parametrize("train", TRAINERS)
def test_an_adapter_s_own_attach_opens_a_session_for_each_training(train: Any) -> None:
    def attach(target: Any) -> Any:
        name = {"torchtitan": "torchtitan", "megatron": "megatron_bridge"}.get(train.__name__, train.__name__)
        module = __import__(f"healthcheck.trainers.{name}", fromlist=["attach"])
        return module.attach(target, rules=RULES, console=False, record=False)

    _, adapter, steps = train(attach)
    assert (adapter.report["stop"]["step"], adapter.exit_code, steps) == (BAD, 1, BAD)


@pytest.mark.parametrize("train", TRAINERS)
def test_a_run_that_is_over_holds_nothing_of_the_trainer(train: Any) -> None:
    with healthcheck.watch(rules=RULES, console=False, record=False) as health:
        target, adapter, _ = train(health.attach)
    finders, left = [type(finder).__name__ for finder in sys.meta_path], weakref.ref(target)
    del health, target, adapter
    gc.collect()
    assert "AfterImport" not in finders
    assert left() is None


def test_a_class_or_a_stranger_is_refused_with_all_that_can_be_attached() -> None:
    with healthcheck.watch(rules=RULES, console=False, record=False) as health:
        with pytest.raises(healthcheck.UsageError) as error:
            health.attach(torch.nn.Linear(1, 1))
        with pytest.raises(healthcheck.UsageError, match="cannot watch the class Trainer; it takes an object"):
            health.attach(titan_loop.Trainer)
    said = str(error.value)
    assert said.startswith("attach() cannot watch a Linear; it takes an object: a Trainer of transformers or TRL; ")
    for name in ("Lightning", "an Accelerator", "Megatron Bridge", "NeMo AutoModel", "Dream Trainer", "torchtitan"):
        assert name in said
    assert "healthcheck.watch()" in said


SCRIPTS = {
    "torchtitan": """
        from torchtitan.trainer import Trainer
        Trainer(Model(BAD), batches(), steps=9).train()
    """,
    "dream": """
        from dream_trainer.trainer.base import BaseTrainer, CallbackCollection
        BaseTrainer(Model(BAD), batches(), CallbackCollection()).fit()
    """,
    "automodel": """
        from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction, config
        recipe = TrainFinetuneRecipeForNextTokenPrediction(config(Model(BAD), batches(), max_steps=9))
        recipe.setup()
        recipe.run_train_validation_loop()
    """,
    "megatron_bridge": """
        from megatron_loop import config, pretrain
        from megatron.bridge.training import callbacks
        settings = config(train={"train_iters": 9}, model={"chunks": [Model(BAD)]}, dataset={"batches": batches()})
        pretrain(settings, lambda batch, parts: parts[0](**batch)["loss"], callbacks.normalize_callbacks(None))
    """,
}
PACKAGES = {
    "torchtitan/trainer.py": "from titan_loop import *",
    "dream_trainer/trainer/base.py": "from dream_loop import *; BaseTrainer = Trainer",
    "nemo_automodel/recipes/llm/train_ft.py": "from automodel_loop import *",
    "megatron/bridge/training/callbacks.py": """
from megatron_loop import *
def normalize_callbacks(callbacks):
    return callbacks
""",
}


@pytest.fixture
def _packages(tmp_path: Path) -> Any:
    """Packages of the right names beside the script, that hold the drivers' loops; imported anew by each."""
    for name, text in PACKAGES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in {path.split("/")[0] for path in PACKAGES}:
            del sys.modules[name]


@pytest.mark.usefixtures("_packages")
@pytest.mark.parametrize("trainer", SCRIPTS)
def test_a_watched_script_s_trainer_gets_its_adapter_by_itself(trainer: str, play: Any) -> None:
    played = play(f"from told import Model, batches\nBAD = {BAD}\n{textwrap.dedent(SCRIPTS[trainer])}", rules=RULES)
    report = played.session.report
    assert (report["trainer"], report["steps"], report["stop"]["step"]) == (trainer, BAD, BAD)
    assert played.code == 1
    assert played.steps() == list(range(1, BAD + 1))  # counted once
