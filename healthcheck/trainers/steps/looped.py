"""Steps of a loop that says itself when one is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healthcheck.engine.gating import why_not_gateable
from healthcheck.events import EventKind
from healthcheck.probes.values import optimizer_labels
from healthcheck.samples import Sample
from healthcheck.trainers.guarding import guarded
from healthcheck.trainers.steps.seenloss import SeenLoss
from healthcheck.trainers.steps.training import TrainingSteps
from healthcheck.trainers.steps.withheld import WithheldGradients
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

    def clipping(
        self, norm: Any, max_norm: float | None, scaled: bool = False, parameters: list[Any] | None = None
    ) -> None:
        self._next_step_if_ended()
        super().clipping(norm, max_norm, scaled=scaled, parameters=parameters)

    def _before_update(self, optimizer: Any, index: int) -> None:
        super()._before_update(optimizer, index)
        if self.stop.pending and self._withheld is None:  # the loop has not ended yet; weights stay as they are
            self._withheld = WithheldGradients.of(optimizer)

    def _finish_attempt(self, optimizer: Any, index: int, *, skipped: bool | None) -> None:
        self._withheld = None
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
        self._catch_up()
        self._next_step_if_ended(attempt=True)  # a replayed graph steps without an attempt that we see
        self.last_attempt = self._begun
        loss = loss.detach() if hasattr(loss, "detach") else loss
        if loss is not None and self.session.wants(EventKind.LOSS):
            self._emit(EventKind.LOSS, loss=loss, losses=losses)
        counts = {"n_tokens": tokens, "n_samples": samples}
        self._end_told_step(self._last_update[2], loss=loss, losses=losses, metrics=metrics, **counts)

    def _end_told_step(self, skipped: bool | None, **facts: Any) -> None:
        """End the step with what was told about it."""
        optimizer, index, _ = self._last_update
        try:
            self._end_step(optimizer, index, skipped=skipped, **facts)
        finally:
            self._last_update = (None, 0, None)


class WatchedSteps(LoopSteps):
    """Steps of ``watch``: the loop tells its loss after the update, and its backward passes show it before."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._seen_loss = SeenLoss(self.losses)
        self._untold: Any = None
        """The loss that a backward pass showed, for a loop that tells none."""
        self._tells_loss = False

    def listens_to_backward(self, optimizers: int) -> bool:
        """Whether somebody needs it: rules that hold an update back for its loss, or optimizers that may step
        inside of a pass (one for each parameter).
        """
        rules = self.session.rules.rules
        return optimizers > 1 or any(r.selector.metric == "loss" and not why_not_gateable(r) for r in rules)

    def backward_begins(self, tensors: Any) -> None:
        self._catch_up()
        if self._looks_at_passes():
            self._seen_loss.begins(tensors, self.only or ())

    def backward_done(self) -> None:
        if self._inner.first is not None:
            optimizer, self._inner_gradients = self._inner.end(self.view, self._begun)
            self._last_update = (optimizer, 0, None)
        if self._looks_at_passes():
            self._seen_loss.ended(self.only or ())

    def _looks_at_passes(self) -> bool:
        """Whether the loss of a pass is of use: to hold an update back, or because the loop tells none."""
        return not (self._tells_loss and self.gate.nothing_held)

    def _step_inside_backward(self, optimizer: Any) -> None:
        if self._inner.first is None:
            if not self.started:
                self._start()
            self._next_step_if_ended(attempt=True)
        super()._step_inside_backward(optimizer)

    def _gate_on_loss(self, index: int) -> None:
        """The loop tells its loss when the update is made: until then that of its backward passes stands for it."""
        if not self.gate.wants_loss():
            return
        loss = self._untold = self._seen_loss.take()
        if loss is None:
            return
        if self.gate.waits:
            loss = float(loss)  # the gate waits for the device anyway
        self.gate.see([Sample("loss", self._begun, loss, optimizer_labels(index))])

    def _finish_attempt(self, optimizer: Any, index: int, *, skipped: bool | None) -> None:
        if skipped or self._closure_ran:  # nobody asked for it, or it was evaluated again and again
            self._seen_loss.take()
        first = self._last_update
        super()._finish_attempt(optimizer, index, skipped=skipped)
        if first[0] is not None:  # what the loop tells of its step belongs to the first of several optimizers
            self._last_update = first

    def loop_step(self, *, loss: Any = None, **told: Any) -> None:
        untold, self._untold = self._untold, None
        self._tells_loss = loss is not None
        super().loop_step(loss=untold if loss is None else loss, **told)

    def _show_update(self, optimizer: Any, index: int) -> None:
        guarded(self.session, self._gate_on_loss, index)
        super()._show_update(optimizer, index)
