"""What the Trainer of transformers says, in our words: its metrics, its epoch, and the Trainer itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from healthcheck.session import Session

_BOOKKEEPING = ("epoch", "step", "total_flos", "num_input_tokens_seen")
_SPEED = ("_runtime", "_per_second", "_compilation_time")
_DEPTH = 40


def evaluation_results(metrics: Mapping[str, Any], prefix: str) -> tuple[str, dict[str, Any]]:
    """``(data set, results)`` of the Trainer's metrics.

    ``{"eval_news_loss": 1.0, "eval_news_runtime": 2.0}`` -> ``("news", {"loss": 1.0})``. The runtime,
    which is always there, separates the data set's name from the metric's.
    """
    head = next((name[: -len("_runtime")] for name in metrics if name.endswith("_runtime")), prefix)
    dataset = head[len(prefix) + 1 :] if head.startswith(f"{prefix}_") else ""
    results = {}
    for name, value in metrics.items():
        if name not in _BOOKKEEPING and not name.endswith(_SPEED):
            results[name.removeprefix(f"{head}_")] = value
    return dataset, results


def epoch_of(state: Any) -> float:
    return float(getattr(state, "epoch", 0.0) or 0.0)


def is_metric(name: str, value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return not (name in _BOOKKEEPING or name.endswith(_SPEED) or name.startswith(("eval_", "test_", "train_")))


def is_measured(name: str, session: Session) -> bool:
    """Whether we measure it ourselves, unfiltered and at every step."""
    return name == "learning_rate" or name in session.host.registry.metrics


def trainer_on_stack() -> tuple[Any, str | None]:
    """``(trainer, checkpoint it resumes from)`` of the Trainer that is calling; it hands itself to no callback."""
    frame: Any = sys._getframe(1)
    trainer, checkpoint = None, None
    for _ in range(_DEPTH):
        if frame is None:
            break
        name = frame.f_code.co_name
        if name in ("__init__", "_inner_training_loop", "train"):
            found = frame.f_locals.get("self")
            if hasattr(found, "callback_handler") and hasattr(found, "training_step"):
                trainer = trainer or found
                given = frame.f_locals.get("resume_from_checkpoint")
                if isinstance(given, (str, os.PathLike)) and checkpoint is None:
                    checkpoint = os.fspath(given)
                if name == "__init__":
                    break
        frame = frame.f_back
    return trainer, checkpoint
