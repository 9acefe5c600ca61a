"""``trainer.step``: Dream Trainer checks gradients there and raises before anybody has seen them.

Our look comes first: a rule may keep the update from happening, and then the trainer's own check has
nothing to raise about.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from healthcheck.trainers.native import inner_optimizer
from healthcheck.trainers.toldwatch import ToldWatch


class WatchedStep:
    """Takes the place of ``trainer.step`` while a run is watched."""

    def __init__(self, watch: ToldWatch) -> None:
        self._watch = watch
        self._inside: Any = None

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            told = self._watch.told
            inner = inner_optimizer(optimizer)
            if not self._watch.active or told is None or told.only is None or inner not in told.only:
                return original(optimizer, *args, **kwargs)
            self._watch.guard(functools.partial(told.update_begins, inner, (inner,), {}))
            if told.left_out:
                return self._left_out(optimizer, inner)
            told.only.discard(inner)  # torch's own hooks would count this update a second time
            self._inside = inner
            try:
                norm = original(optimizer, *args, **kwargs)
            finally:
                told.only.add(inner)
                self._inside = None
            return norm

        return step

    def updated(self, optimizer: Any) -> None:
        """``post_optimizer_step``: gradients are still there, the schedule has not moved on."""
        told, inner = self._watch.told, inner_optimizer(optimizer)
        if told is not None and told.only is not None and inner is self._inside:
            told.only.add(inner)
            told.update_done(inner)
            told.only.discard(inner)

    def _left_out(self, optimizer: Any, inner: Any) -> Any:
        """No update, no callbacks round it, no step of the schedule; gradients are cleared as always."""
        import torch

        told = self._watch.told
        assert told is not None
        norm = torch.zeros(())
        self._watch.guard(told.update_done, inner)
        optimizer.zero_grad()
        return norm
