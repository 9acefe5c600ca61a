"""Callback objects for NeMo AutoModel recipes, with the interface that its documentation describes.

No release up to 0.7.0 has them (``nemo_automodel.components.callbacks`` is a pull request). With
:class:`healthcheck.trainers.automodel.callback.CallbackRecipe` they work on released recipes; a version that
calls callbacks itself can be given the same objects.
"""

from __future__ import annotations

import functools
from collections.abc import Callable as Function
from collections.abc import Iterable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Function[..., Any])

EVENTS = (
    "on_train_start",
    "on_train_batch_end",
    "on_validation_end",
    "on_save_checkpoint",
    "on_exception",
    "on_train_end",
)


class Callback:
    """Override what you need. All methods run on every rank; see :func:`rank_zero_only`."""

    def on_train_start(self, recipe: Any, **kwargs: Any) -> None:
        """After setup, before the first update."""

    def on_train_batch_end(self, recipe: Any, **kwargs: Any) -> None:
        """After each update. ``train_log_data``: its ``step`` (from 0), ``epoch``, ``metrics``, ``timestamp``."""

    def on_validation_end(self, recipe: Any, **kwargs: Any) -> None:
        """After all validation sets. ``val_results``: name of the set -> its metrics sample."""

    def on_save_checkpoint(self, recipe: Any, **kwargs: Any) -> None:
        """A checkpoint was written. ``checkpoint_info``: ``epoch``, ``step``, ``train_loss``, ``val_losses``,
        ``checkpoint_path``, ``best_metric_key``."""

    def on_exception(self, recipe: Any, **kwargs: Any) -> None:
        """Training failed with ``exception``, which is raised again afterwards."""

    def on_train_end(self, recipe: Any, **kwargs: Any) -> None:
        """Training ended without an exception."""


def rank_zero_only(function: F) -> F:
    """Call a method of a callback on the main rank only, as ``recipe.dist_env.is_main`` says."""

    @functools.wraps(function)
    def on_main(self: Any, recipe: Any, *args: Any, **kwargs: Any) -> Any:
        main = getattr(getattr(recipe, "dist_env", None), "is_main", True)
        return function(self, recipe, *args, **kwargs) if main else None

    return cast("F", on_main)


def call_all(callbacks: Iterable[Any], event: str, recipe: Any, **kwargs: Any) -> None:
    """Call an event of each callback in order, those that do not have it excepted. Their errors are the caller's."""
    for callback in callbacks:
        method = getattr(callback, event, None)
        if method is not None:
            method(recipe, **kwargs)
