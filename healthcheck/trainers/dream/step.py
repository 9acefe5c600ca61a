"""``trainer.step``: Dream Trainer checks gradients there and raises before anybody has seen them.

Our look comes first: a rule may keep the update from happening, and then the trainer's own check has
nothing to raise about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from healthcheck.trainers.native import AnnouncedWatch, inner_optimizer
from healthcheck.trainers.steps.sources import AnnouncedSource


class WatchedStep:
    """Takes the place of ``trainer.step`` while a run is watched."""

    def __init__(self, watch: AnnouncedWatch) -> None:
        self._watch = watch
        self._inside: Any = None
        """The optimizer whose update is being made."""

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            source, inner = self._watch.source, inner_optimizer(optimizer)
            if not self._watch.active or source is None or not source.watches(inner):
                return original(optimizer, *args, **kwargs)
            if self._watch.guard(source.update_begins, inner) is False:
                return self._left_out(source, optimizer, inner)
            self._inside = inner
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                self._inside = None
                source.update_fails(inner)  # if nobody has said that it was made

        return step

    def updated(self, optimizer: Any) -> None:
        """``post_optimizer_step``: gradients are still there, the schedule has not moved on."""
        source, inner = self._watch.source, inner_optimizer(optimizer)
        if source is not None and inner is self._inside:
            source.update_ends(inner)

    def _left_out(self, source: AnnouncedSource, optimizer: Any, inner: Any) -> Any:
        """No update, no callbacks round it, no step of the schedule; gradients are cleared as always."""
        import torch

        self._watch.guard(source.update_ends, inner)
        optimizer.zero_grad()
        return torch.zeros(())
