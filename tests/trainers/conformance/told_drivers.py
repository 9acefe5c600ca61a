"""The toy run in trainers that are driven: loops that copy the order of the real ones (``tests/trainers/drivers``)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drivers import Order, Run
from toy import EVAL_EVERY, Toy, loader, optimizer_of

sys.path.insert(0, str(Path(__file__).parents[1] / "drivers"))

import automodel_loop
import dream_loop
import megatron_loop
import titan_loop


def unless_it_raises(train: Callable[[], None]) -> BaseException | None:
    """Dream Trainer and torchtitan raise by themselves about what is not finite."""
    try:
        train()
    except RuntimeError as error:
        if "finite" not in str(error) and "Invalid gradients" not in str(error):
            raise
        return error
    return None


def forward_step(batch: Any, model: list[Any]) -> Any:
    return model[0](**batch)["loss"]


def megatron_bridge(order: Order) -> Run:
    from healthcheck.trainers.megatron_bridge import HealthCheckCallback

    fault = order.fault
    model = Toy(fault)
    config = megatron_loop.config(
        train={"train_iters": fault.steps},
        model={"chunks": [order.wrap(model)]},
        optimizer={
            "lr": 0.0 if fault.name == "lr_zero" else 0.001,
            "scaler": 256.0 if fault.name == "scaler_overflow" else None,
            "zero_grad": fault.name != "missing_zero_grad",
        },
        dataset={"batches": loader(fault.steps), "valid": loader(2, seed=2)},
        validation={"eval_interval": EVAL_EVERY, "final": False},  # the other trainers make none
        checkpoint={"save": str(order.folder / "megatron"), "save_interval": order.save_every or None},
    )
    callback = HealthCheckCallback(**order.options) if order.watched else None
    megatron_loop.pretrain(config, forward_step, callbacks=[callback] if callback else None)
    return Run(model, callback.session if callback else None, {"config": config, "callback": callback})


def automodel(order: Order) -> Run:
    from healthcheck.trainers.automodel import HealthCheckRecipe

    plain = automodel_loop.TrainFinetuneRecipeForNextTokenPrediction
    fault = order.fault
    model = Toy(fault)
    config = automodel_loop.config(
        order.wrap(model),
        loader(fault.steps),
        max_steps=fault.steps,
        optimizer=optimizer_of(model),
        zero_grad=fault.name != "missing_zero_grad",
        validation={"default": loader(2, seed=2)},
        val_every_steps=EVAL_EVERY,
        checkpoint_dir=str(order.folder / "automodel"),
        ckpt_every_steps=order.save_every,
    )
    watched: Any = type("Recipe", (HealthCheckRecipe, plain), {"healthcheck": order.options})
    recipe: Any = watched(config) if order.watched else plain(config)
    recipe.setup()
    recipe.run_train_validation_loop()
    return Run(model, recipe.health.session if order.watched else None, {"recipe": recipe})


def dream(order: Order) -> Run:
    from healthcheck.trainers.dream import HealthCheckCallback

    fault = order.fault
    model = Toy(fault)
    callback = HealthCheckCallback(**order.options) if order.watched else None
    trainer = dream_loop.Trainer(
        order.wrap(model),
        loader(fault.steps),
        dream_loop.CallbackCollection([callback] if callback else []),
        optimizer=optimizer_of(model),
        validation=loader(2, seed=2),
        val_every_n_steps=EVAL_EVERY,
        zero_grad=fault.name != "missing_zero_grad",
    )
    ended = unless_it_raises(trainer.fit)
    return Run(model, callback.session if callback else None, {"trainer": trainer, "ended": ended})


def torchtitan(order: Order) -> Run:
    from healthcheck.trainers.torchtitan import HealthCheckTrainer

    fault = order.fault
    model = Toy(fault)
    watched: Any = type("Trainer", (HealthCheckTrainer, titan_loop.Trainer), {"healthcheck": order.options})
    trainer: Any = (watched if order.watched else titan_loop.Trainer)(
        order.wrap(model),
        loader(fault.steps),
        optimizers=[optimizer_of(model)],
        steps=fault.steps,
        log_freq=5,
        validation=loader(2, seed=2),
        validate_every=EVAL_EVERY,
        zero_grad=fault.name != "missing_zero_grad",
        folder=str(order.folder / "titan"),
        interval=order.save_every or 500,
    )
    ended = unless_it_raises(trainer.train)
    return Run(model, trainer.health.session if order.watched else None, {"trainer": trainer, "ended": ended})


TOLD: dict[str, Callable[[Order], Run]] = {
    "megatron_bridge": megatron_bridge,
    "automodel": automodel,
    "dream": dream,
    "torchtitan": torchtitan,
}
