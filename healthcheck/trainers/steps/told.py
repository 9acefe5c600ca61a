"""Steps of a framework that says when an update begins and ends, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthcheck.events import EventKind
from healthcheck.trainers.steps.looped import LoopSteps
from healthcheck.trainers.steps.lossmath import LossMath


class ToldLosses(LossMath):
    """Micro-batch losses whose weight is known from the framework, not guessed from the expression."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.known_weight = weight

    def weight(self) -> float | None:
        return self.known_weight


class ToldSteps(LoopSteps):
    """Numbers come from the framework; what torch shows in between is put into the step under way.

    What torch has shown is kept before what the framework says afterwards: a loss that was
    differentiated is known before the update, its reported average only after it.
    """

    _loss_step = -1
    """Step in which a loss was last seen."""

    def begins(self, step: int) -> None:
        """Update number ``step`` (from 1) begins, unless it has begun with its data already."""
        self.start()
        if self._ended:
            self._begun = step - 1
            self._next_step_if_ended(attempt=True)
        elif step != self._begun:
            self._begun = step
            self.session.begin_step(step)

    @property
    def under_way(self) -> bool:
        """True between the beginning of a step and its end."""
        return not self._ended

    @property
    def left_out(self) -> bool:
        """True while the update that has been shown is to be kept from happening."""
        return self._withheld is not None

    def ends(
        self,
        step: int,
        *,
        loss: Any = None,
        losses: Mapping[str, Any] | None = None,
        grad_norm: Any = None,
        max_norm: float | None = None,
        lr: Any = None,
        tokens: Any = None,
        samples: int | None = None,
        skipped: bool | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Update number ``step`` is over.

        :param loss: of the whole step; a number or a scalar tensor, which is not read here.
        :param grad_norm: L2 norm before clipping.
        :param skipped: True if the framework did not apply the update.
        """
        self.begins(step)
        self.last_attempt = self._begun
        loss, grad_norm = _detached(loss), _detached(grad_norm)
        if loss is not None and self._loss_step != self._begun and self.session.wants(EventKind.LOSS):
            self._emit(EventKind.LOSS, loss=loss, losses=losses, loss_weight=1.0)
        if self._grad_norm is None:
            self._grad_norm = grad_norm
        if self._max_norm is None:
            self._max_norm = max_norm
        skipped = self._last_update[2] if skipped is None else skipped
        if not self.only:  # no optimizer is looked at: that an update was made is the framework's word
            skipped = bool(skipped)
        counts = {"n_tokens": tokens, "n_samples": samples}
        self._end_told_step(skipped, loss=loss, losses=losses, lr=lr, metrics=metrics, **counts)

    def _emit(self, kind: EventKind, **facts: Any) -> None:
        if kind is EventKind.LOSS and facts.get("loss") is not None:
            self._loss_step = self._begun
        super()._emit(kind, **facts)


def _detached(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value
