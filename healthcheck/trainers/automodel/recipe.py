"""Callbacks for recipes of NeMo AutoModel that have none: a mixin that calls them in the documented places."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from healthcheck.trainers.automodel.callbacks import call_all


class CallbackRecipe:
    """Calls callbacks from a released recipe: ``class Mine(CallbackRecipe, TheRecipe)``.

    :param callbacks: objects with methods of :class:`Callback`; their errors end the training.
    """

    def __init__(self, cfg: Any, *args: Any, callbacks: Sequence[Any] = (), **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)  # type: ignore[call-arg]
        # Recipes keep what is set on them in checkpoints; a tuple is left alone.
        self.callbacks = tuple(callbacks)
        self._validation_seen: dict[str, Any] = {}

    def run_train_validation_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._call("on_train_start")
            result = super().run_train_validation_loop(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            self._call("on_exception", exception=error)
            raise
        self._call("on_train_end")
        return result

    def log_train_metrics(self, log_data: Any, *args: Any, **kwargs: Any) -> Any:
        self._train_metrics_ready(log_data)
        result = super().log_train_metrics(log_data, *args, **kwargs)  # type: ignore[misc]
        self._call("on_train_batch_end", train_log_data=log_data)
        return result

    def log_val_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """``(name, data, logger)``, or ``(data)`` in recipes that know one validation set only."""
        result = super().log_val_metrics(*args, **kwargs)  # type: ignore[misc]
        given = [*args, *(kwargs[k] for k in ("val_name", "log_data") if k in kwargs)]
        name, data = (given[0], given[1]) if isinstance(given[0], str) else ("validation", given[0])
        if data is not None:
            self._validation_seen[name] = data
        if self._validation_complete(name):
            results, self._validation_seen = self._validation_seen, {}
            self._call("on_validation_end", val_results=results)
        return result

    def save_checkpoint(
        self,
        epoch: int,
        step: int,
        train_loss: Any = None,
        val_loss: Any = None,
        best_metric_key: str = "default",
        **kwargs: Any,
    ) -> Any:
        given = (epoch, step, train_loss, val_loss)
        result = super().save_checkpoint(*given, best_metric_key=best_metric_key, **kwargs)  # type: ignore[misc]
        config = getattr(getattr(self, "checkpointer", None), "config", None)
        if getattr(config, "enabled", True):
            root = str(getattr(config, "checkpoint_dir", "") or "")
            info = {
                "epoch": epoch,
                "step": step,
                "train_loss": train_loss,
                "val_losses": val_loss or {},
                "checkpoint_path": os.path.join(root, f"epoch_{epoch}_step_{step}"),
                "best_metric_key": best_metric_key,
            }
            self._call("on_save_checkpoint", checkpoint_info=info)
        return result

    def _train_metrics_ready(self, log_data: Any) -> None:
        """Before the recipe logs the metrics of an update."""

    def _call(self, event: str, **kwargs: Any) -> None:
        call_all(self.callbacks, event, self, **kwargs)

    def _validation_complete(self, name: str) -> bool:
        """Whether the set that was just reported is the last one of this validation."""
        expected = list(getattr(self, "val_dataloaders", None) or ())
        if name in expected and getattr(self, "domain_mixture", None) is not None:
            return False  # the weighted sum of all sets comes last
        return set(expected) <= set(self._validation_seen)
