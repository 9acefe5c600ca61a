"""What the tests of Megatron Bridge share: a small model, the driver's configuration, the callback."""

from __future__ import annotations

from typing import Any

import megatron_loop
import told
import torch

from healthcheck.trainers.megatron_bridge import HealthCheckCallback

WATCH = {
    "version": 1,
    "rules": {
        "loss": {"metric": "loss", "when": "nonfinite", "severity": "error", "then": ["stop"]},
        "norm": {"metric": "grad_norm", "when": {"above": 1e6}},
        "rate": {"metric": "lr", "when": {"equals": 0}},
        "eval": {"metric": "eval.loss", "when": {"above": 1e6}},
        "test": {"metric": "test.loss", "when": {"above": 1e6}},
    },
}


class Model(told.Model):
    """Returns the loss itself."""

    def forward(self, x: Any) -> Any:
        return super().forward(x)["loss"]


def forward_step(batch: Any, model: list[Any]) -> Any:
    return model[-1](batch)


def config(model: list[Any] | None = None, iterations: int = 6, **sections: dict[str, Any]) -> Any:
    batches = [torch.ones(2, 3) * (i + 1) for i in range(20)]
    given = {
        "train": {"train_iters": iterations},
        "model": {"chunks": model or [Model()]},
        "dataset": {"batches": batches},
    }
    for name, values in sections.items():
        given.setdefault(name, {}).update(values)
    return megatron_loop.config(**given)


def callback(rules: Any = WATCH, **options: Any) -> HealthCheckCallback:
    return HealthCheckCallback(rules, console=False, record=options.pop("record", False), **options)
