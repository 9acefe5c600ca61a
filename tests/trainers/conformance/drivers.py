"""The toy run in every trainer, watched or plain. Each driver is the trainer's real training loop."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from toy import BATCH, EVAL_EVERY, FAULTS, Data, Fault, Toy, evaluate, loader, optimizer_of, scaler_of

import healthcheck

RULES = Path(__file__).with_name("rules.yaml")


@dataclass
class Run:
    """What one run of the toy left."""

    model: Toy
    session: Any = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def fired(self) -> list[tuple[str, int]]:
        """``(rule, step)`` of all alerts that nobody else explains."""
        return [(a.rule, a.fired_step) for a in self.session.alerts if not a.explained_by]

    @property
    def weights(self) -> dict[str, Any]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    @property
    def finite(self) -> bool:
        return all(bool(torch.isfinite(value).all()) for value in self.model.state_dict().values())


@dataclass
class Order:
    """What a driver is asked for."""

    fault: Fault
    folder: Path
    rules: Any = RULES
    watched: bool = True
    record: bool = False
    wrap: Callable[[Any], Any] = lambda model: model
    """Round the model: DDP, compile."""
    resume: str | None = None
    save_every: int = 0
    callbacks: tuple[Any, ...] = ()
    prepare: Callable[[Any], None] = lambda session: None
    """Called with the session, before the first step where the trainer lets us."""

    @property
    def options(self) -> dict[str, Any]:
        return {
            "rules": self.rules,
            "console": False,
            "record": self.record,
            "callbacks": (*self.callbacks, _Prepared(self.prepare)),
        }


class _Prepared(healthcheck.Callback):
    def __init__(self, prepare: Callable[[Any], None]) -> None:
        self._prepare = prepare

    @healthcheck.hookimpl
    def healthcheck_configure(self, session: Any) -> None:
        self._prepare(session)


def plain_step(model: Any, optimizer: Any, scaler: Any, batch: Any, fault: Fault) -> Any:
    """Forward, backward, update, as people write it."""
    loss = model(**batch)["loss"]
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    if fault.name != "missing_zero_grad":
        optimizer.zero_grad()
    return loss


def loop(order: Order) -> Run:
    """``healthcheck.watch`` round a loop of one's own."""
    fault = order.fault
    model = Toy(fault)
    optimizer, scaler = optimizer_of(model), scaler_of(fault)
    wrapped = order.wrap(model)
    watch = healthcheck.watch(wrapped, optimizer, **order.options) if order.watched else nullcontext()
    with watch as health:
        for number, batch in enumerate(loader(fault.steps), start=1):
            loss = plain_step(wrapped, optimizer, scaler, batch, fault)
            if health is not None:
                health.step(loss=loss)
            if number % EVAL_EVERY == 0:
                value = evaluate(wrapped)
                if health is not None:
                    health.log(**{"eval.loss": value})
            if health is not None and health.should_stop:
                break
    return Run(model, getattr(health, "session", None))


SCRIPT = """
import toy, healthcheck
from drivers import plain_step, evaluate, loader, Toy, optimizer_of, scaler_of, EVAL_EVERY
order = toy.ORDER
fault = order.fault
model = toy.MODEL = Toy(fault)
optimizer, scaler = optimizer_of(model), scaler_of(fault)
wrapped = order.wrap(model)
for number, batch in enumerate(loader(fault.steps), start=1):
    plain_step(wrapped, optimizer, scaler, batch, fault)
    if number % EVAL_EVERY == 0:
        healthcheck.log(**{"eval.loss": evaluate(wrapped)})
"""


def script(order: Order) -> Run:
    """An unmodified script, as ``healthcheck run`` runs it."""
    import gc

    import toy

    from healthcheck.instrument.script import ScriptTrainer

    gc.collect()
    path = order.folder / "train.py"
    path.write_text(SCRIPT)
    toy.ORDER = order  # type: ignore[attr-defined]
    if not order.watched:
        exec(compile(SCRIPT, str(path), "exec"), {"__name__": "__main__"})
        return Run(toy.MODEL)  # type: ignore[attr-defined]
    session = healthcheck.open_session(target="train.py", rules=order.rules, console=False, record=order.record)
    for callback in order.callbacks:
        session.register(callback)
    order.prepare(session)
    ScriptTrainer(session).run(str(path), [])
    return Run(toy.MODEL, session)  # type: ignore[attr-defined]


def huggingface(order: Order) -> Run:
    """The Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    from healthcheck.trainers.huggingface import HealthCheckCallback

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    fault = order.fault
    model = Toy(fault)
    args = TrainingArguments(
        str(order.folder / "hf"),
        max_steps=fault.steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        max_grad_norm=0.0,
        eval_strategy="steps",
        eval_steps=EVAL_EVERY,
        save_strategy="steps" if order.save_every else "no",
        save_steps=order.save_every or 500,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    optimizer = optimizer_of(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    callback = HealthCheckCallback(**order.options) if order.watched else None
    trainer = InOrder(
        model,
        args,
        train_dataset=Data(fault.steps),
        eval_dataset=Data(2, seed=2),
        optimizers=(optimizer, schedule),
        callbacks=[callback] if callback is not None else [],
    )
    trainer.accelerator.scaler = scaler_of(fault)
    if order.resume:
        model.step = int(order.resume.rsplit("-", 1)[1])
    trainer.train(resume_from_checkpoint=order.resume)
    return Run(model, callback.session if callback is not None else None, {"trainer": trainer, "callback": callback})


def lightning(order: Order) -> Run:
    """The Trainer of Lightning, automatic optimization."""
    import lightning.pytorch as pl

    from healthcheck.trainers.lightning import HealthCheckCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, model: Toy) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.model(**batch)["loss"])

        def optimizer_zero_grad(self, epoch: int, index: int, optimizer: Any) -> None:
            if self.model.fault.name != "missing_zero_grad":
                optimizer.zero_grad()

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.model)

    fault = order.fault
    model = Toy(fault)
    callback = HealthCheckCallback(**order.options) if order.watched else None
    callbacks: list[Any] = [callback] if callback is not None else []
    if order.save_every:
        callbacks.append(
            pl.callbacks.ModelCheckpoint(
                order.folder / "pl", every_n_train_steps=order.save_every, save_top_k=-1, filename="{step}"
            )
        )
    scaler = scaler_of(fault)
    plugins = [pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)] if scaler is not None else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            default_root_dir=order.folder,
            max_steps=fault.steps,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=bool(order.save_every),
            enable_progress_bar=False,
            enable_model_summary=False,
            val_check_interval=EVAL_EVERY,
            plugins=plugins,
            callbacks=callbacks,
        )
        module = Module(model)
        if order.resume:
            model.step = int(order.resume.rsplit("=", 1)[1].split(".")[0])
        trainer.fit(module, loader(fault.steps), loader(2, seed=2), ckpt_path=order.resume)
    return Run(model, callback.session if callback is not None else None, {"trainer": trainer, "callback": callback})


def accelerate(order: Order) -> Run:
    """A loop with an Accelerator that is handed to ``attach``."""
    from accelerate import Accelerator

    fault = order.fault
    model = Toy(fault)
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = scaler_of(fault)
    prepared, optimizer, data = accelerator.prepare(order.wrap(model), optimizer_of(model), loader(fault.steps))
    first = 0
    with healthcheck.watch(**order.options) if order.watched else nullcontext() as health:
        if health is not None:
            health.attach(accelerator)
        if order.resume:
            accelerator.load_state(order.resume)
            model.step = first = int(order.resume.rsplit("-", 1)[1])
            data = accelerator.skip_first_batches(data, first)
        for number, batch in enumerate(data, start=first + 1):
            loss = prepared(**batch)["loss"]
            accelerator.backward(loss)
            optimizer.step()
            if fault.name != "missing_zero_grad":
                optimizer.zero_grad()
            if number % EVAL_EVERY == 0:
                value = evaluate(prepared)
                if health is not None:
                    health.log(**{"eval.loss": value})
            if order.save_every and number % order.save_every == 0:
                accelerator.save_state(str(order.folder / f"acc-{number}"))
            if health is not None and health.should_stop:
                break
    return Run(model, getattr(health, "session", None), {"accelerator": accelerator})


DRIVERS: dict[str, Callable[[Order], Run]] = {
    "loop": loop,
    "script": script,
    "huggingface": huggingface,
    "lightning": lightning,
    "accelerate": accelerate,
}

__all__ = ["DRIVERS", "FAULTS", "RULES", "Order", "Run"]
