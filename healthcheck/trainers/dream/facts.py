"""What Dream Trainer says, in our words: its models, its results, its length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthcheck.names import canonical_metric
from healthcheck.trainers.adapting import joined


def named(models: Mapping[str, Any]) -> Any:
    """The trainer's models under its own names; a single one without."""
    import torch

    return torch.nn.ModuleDict(models) if len(models) > 1 else joined(models.values(), "model")


def scalars(values: Mapping[str, Any], leave_out: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """Scalars of a result under canonical names; a device scalar stays where it is."""
    found = {}
    for name, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if name not in leave_out and (number or getattr(value, "ndim", None) == 0):
            found[canonical_metric(name)] = value
    return found or None


def planned_steps(trainer: Any) -> int | None:
    epochs = getattr(getattr(trainer, "training_parameters", None), "n_epochs", None)
    batches = int(getattr(trainer, "_num_train_batches", 0) or 0)
    parts = int(getattr(trainer, "num_gradient_accumulation_steps", 1) or 1)
    return int(epochs) * (batches // parts) if epochs and batches else None
