"""Steps of a loop that says itself when one is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthcheck.events import EventKind
from healthcheck.trainers.modelview import parameters_of
from healthcheck.trainers.steps import TrainingSteps
from healthcheck.trainers.stopping import StopSwitch


class PatientStop(StopSwitch):
    """Never raises from inside an optimizer: the loop is asked to end first, and :meth:`insist` comes later."""

    def check(self) -> None:
        return

    def insist(self) -> None:
        super().check()


class LoopSteps(TrainingSteps):
    """Optimizers are watched from ``step`` to ``step``; the loop's own call ends the step."""

    _last_update: tuple[Any, int, bool | None] = (None, 0, None)
    _facts: Mapping[str, Any] = {}
    """What the loop said about the step that is being ended."""

    def clipping(self, norm: Any, max_norm: float | None, scaled: bool = False) -> None:
        self._next_step_if_ended()
        super().clipping(norm, max_norm, scaled=scaled)

    def _before_update(self, optimizer: Any, index: int) -> None:
        super()._before_update(optimizer, index)
        if self.stop.pending and not self._dropped:  # the loop has not ended yet; weights stay as they are
            self._dropped = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
            for parameter, _ in self._dropped:
                parameter.grad = None

    def _finish_attempt(self, optimizer: Any, index: int, *, skipped: bool | None) -> None:
        self._dropped = []
        self._last_update = (optimizer, index, skipped)

    def loop_step(
        self,
        *,
        loss: Any = None,
        losses: Mapping[str, Any] | None = None,
        tokens: int | None = None,
        samples: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """The loop says that one update is over."""
        if not self.started:
            self._start()
        self.phases.end()
        self._next_step_if_ended(attempt=True)  # a replayed graph steps without an attempt that we see
        self.last_attempt = self._begun
        loss = loss.detach() if hasattr(loss, "detach") else loss
        optimizer, index, skipped = self._last_update
        if loss is not None and self.session.wants(EventKind.LOSS):
            self._emit(EventKind.LOSS, loss=loss, losses=losses)
        self._facts = {"loss": loss, "losses": losses, "n_tokens": tokens, "n_samples": samples, "metrics": metrics}
        try:
            self._end_step(optimizer, index, skipped=skipped)
        finally:
            self._facts = {}
            self._last_update = (None, 0, None)

    def _emit_update(self, kind: EventKind, optimizer: Any, index: int, **facts: Any) -> None:
        if kind is EventKind.STEP_END:
            facts |= self._facts
        super()._emit_update(kind, optimizer, index, **facts)
