"""What the Trainer of Lightning says, in our words: its evaluation results, its length, its base class."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from healthcheck.names import canonical_metric, is_evaluation

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_LOADER = "/dataloader_idx_"


def callback_class() -> Any:
    """``Callback`` of the package that the script uses; each Trainer takes the other one's as well."""
    loaded = [name for name in _PACKAGES if name in sys.modules]
    error: ImportError | None = None
    for name in (*loaded, *_PACKAGES):
        try:
            return importlib.import_module(name).Callback
        except ImportError as failed:
            error = failed
    raise ImportError("healthcheck.trainers.lightning needs the package lightning or pytorch-lightning") from error


def evaluation_results(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Results of an evaluation by data set, out of all that was logged so far.

    ``{"val_loss/dataloader_idx_1": 2.0, "train_loss": 1.0}`` -> ``{"1": {"eval.loss": 2.0}}``.
    """
    found: dict[str, dict[str, Any]] = {}
    for given, value in metrics.items():
        name, _, loader = given.partition(_LOADER)
        canonical = canonical_metric(name)
        if is_evaluation(canonical):
            found.setdefault(loader, {})[canonical] = value
    return found


def planned_steps(trainer: Any) -> int | None:
    if trainer.max_steps and trainer.max_steps > 0:
        return int(trainer.max_steps)
    try:
        planned = float(trainer.estimated_stepping_batches)
    except Exception:  # loaders without a length, and whatever a module's own may raise
        return None
    return int(planned) if planned < float("inf") else None
