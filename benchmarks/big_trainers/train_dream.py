"""Dream Trainer's own loop: its world, its setup of models, optimizers and loaders, its step with the checks that it makes.

One process, one device. ``--watched`` adds healthcheck's callback; without it nothing here knows of healthcheck.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from common import Script, batches
from torch import nn

script = Script("dream-trainer")
if importlib.util.find_spec("registry") is None:  # nobody publishes it; a class that the export callback compares with
    registry = ModuleType("registry")
    registry.Module = type("Module", (), {})  # type: ignore[attr-defined]
    sys.modules["registry"] = registry
    script.given("registry.Module (an empty class)")

from dream_trainer.callbacks import CallbackCollection
from dream_trainer.configs import DeviceParameters, TrainingParameters
from dream_trainer.trainer import BaseTrainer, BaseTrainerConfig

if script.cpu:  # it names a backend for the accelerator and one for the processor, here twice the same
    import torch.distributed as dist

    torch.cpu.current_device = lambda: 0  # type: ignore[assignment, return-value]
    begin = dist.init_process_group
    dist.init_process_group = lambda backend=None, **given: begin("gloo", **given)  # type: ignore[assignment]

ROWS, LENGTH, VOCABULARY = 8, 32, 64


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 64)
        self.hidden = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64))
        self.out = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        inside = self.tokens(tokens)
        return self.out(inside + self.hidden(inside))


class Rows(list[Any]):
    batch_size = ROWS


class Trainer(BaseTrainer):  # type: ignore[misc]
    def configure_models(self) -> None:
        self.network = Network()

    def init_weights(self) -> None:
        torch.manual_seed(0)
        for module in self.network.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def configure_optimizers(self) -> Any:
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=1e-3)
        return {self.network: self.optimizer}

    def configure_dataloaders(self) -> Any:
        made = batches(script.count + 4, rows=ROWS, length=LENGTH, vocabulary=VOCABULARY)
        return Rows({"tokens": rows} for rows in made[4:]), Rows({"tokens": rows} for rows in made[:4])

    def configure_metrics(self) -> None:
        return

    def model_state_dict(self, **given: Any) -> dict[str, Any]:
        return {name: model.state_dict() for name, model in self.named_models().items()}

    def loss(self, batch: Any) -> Any:
        tokens = batch["tokens"]
        output = self.network(tokens[:, :-1])
        return nn.functional.cross_entropy(output.float().flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(batch)
        if script.poisons(batch_idx + 1):
            loss = loss * float("nan")
        self.backward(loss)
        norm = self.step(self.optimizer)
        script.loss(loss)
        return {"loss": loss, "grad_norm": norm}

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.loss(batch)}


@dataclass(kw_only=True)
class Config(BaseTrainerConfig):  # type: ignore[misc]
    pass


def main() -> None:
    callbacks: list[Any] = []
    if script.watched:
        from healthcheck.trainers.dream import HealthCheckCallback

        callbacks.append(HealthCheckCallback())
    trainer = Trainer(
        Config(
            project="p",
            group="g",
            experiment="e",
            seed=1,
            device_parameters=DeviceParameters.SINGLE_DEVICE(compile_model=False),
            training_parameters=TrainingParameters(n_epochs=1, val_every_n_steps=10, gradient_clip_val=1.0),
            callbacks=CallbackCollection(callbacks),
        )
    )
    try:
        trainer.fit()
    finally:
        if script.watched:
            script.judged(callbacks[0])
        script.end([trainer.network] if hasattr(trainer, "network") else [])


main()
torch.distributed.destroy_process_group()
raise SystemExit(script.exit_code)
