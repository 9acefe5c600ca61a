"""What counts as a step where optimizers tell of their updates one by one, and which optimizers share one."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

from healthcheck.events import EventKind
from healthcheck.trainers.controls import TorchControls
from healthcheck.trainers.modelview import FoundModel, living_optimizers, parameters_of
from healthcheck.trainers.steps.count import StepCount
from healthcheck.trainers.steps.withheld import WithheldGradients

if TYPE_CHECKING:
    from healthcheck.session import Session


_PAST: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers of runs in this process that are over. Some outlive them, by a hook, a notebook or a fixture."""


class UpdateSteps(StepCount):
    """Counts attempted updates of one or several optimizers, and knows what the one at hand is like.

    A step ends when the optimizers that stepped in the step before have all stepped again; the
    next begins with the next backward pass or attempt. The step number is that of the optimizer
    seen first: its n-th attempt is in step n. Optimizers that an earlier run in this process left
    behind count from their first step in this one.

    :param only: optimizers to look at; None for all.
    """

    def __init__(
        self, session: Session, view: FoundModel, controls: TorchControls, *, only: list[Any] | None = None
    ) -> None:
        super().__init__(session, view)
        self.controls = controls
        self.stop = controls.stop
        self.only = None if only is None else weakref.WeakSet(only)
        self._index: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._attempted: set[int] = set()
        self._expected: set[int] | None = None
        self._living = 1
        self._batch: Any = None
        self._kept_gradients: Any = None
        """For the events before an update: gradients that probes have looked at."""
        self._inner_gradients: Any = None
        """Measured inside the backward pass, for the end of the step."""
        self.unmatched_loads: list[tuple[Any, str]] = []
        self._differentiated: bool | None = None
        """Whether a backward pass was made since the last update; None before the first pass."""
        self._clipped_idly = False
        """Whether gradients were clipped after the last update, and before there were new ones."""
        self._clear_update()

    def _clear_update(self) -> None:
        """Forget what belongs to one update of one optimizer."""
        self._grad_norm: Any = None
        self._max_norm: float | None = None
        self._clipped_scaled: bool | None = None
        self._clipped: list[Any] | None = None
        self._backward_ended = False
        self._loss_scale: Any = None
        self._closure_ran = False
        self._withheld: WithheldGradients | None = None

    def begin_anew(self) -> None:
        """Another training begins in this run: its optimizers have nothing to do with those before."""
        self._ended = True
        self._attempted, self._expected = set(), None
        self._index.clear()
        self.view.forget_optimizers()
        self._clear_update()
        self._look_around()
        self._announce()

    def _look_around(self) -> None:
        optimizers = [o for o in living_optimizers() if o not in _PAST] if self.only is None else list(self.only)
        self._seen.update(optimizers)
        self._living = len({id(parameters_of(o)[0]) for o in optimizers if parameters_of(o)})
        self.view.scan(optimizers)

    def finish(self) -> None:
        _PAST.update(self._seen)
        super().finish()

    # -- attempts ---------------------------------------------------------------------

    def _attempt(self, optimizer: Any) -> int:
        """An optimizer is about to step, or to be skipped. Returns its index."""
        if not self.started:
            self._start()
        index = self._index.get(optimizer)
        if index is None:
            # Those that are gone have left theirs.
            index = next(i for i in itertools.count() if i not in self._index.values())
            self._index[optimizer] = index
            self._seen.add(optimizer)
            _PAST.discard(optimizer)
            self.view.add_optimizer(optimizer)
            self._met(optimizer)
        self.session.unit = "step"
        if index in self._attempted and not self._ended:  # the others did not step this time
            self._ended = True
            self._emit(EventKind.STEP_END, optimizer=optimizer, optimizer_index=index, held_back=self._held_back())
            self._check_limits()
            self.stop.check()
        if index in self._attempted or self._begun == self._first_step:
            self._next_step_if_ended(attempt=True)
        self._attempted.add(index)
        if self._differentiated:
            self._differentiated = False
        self.last_attempt = self._begun
        return index

    def _met(self, optimizer: Any) -> None:
        """An optimizer steps for the first time."""

    def _finish_attempt(self, optimizer: Any, index: int, *, skipped: bool | None) -> None:
        expected = self._expected
        complete = len(self._attempted) >= self._living if expected is None else self._attempted >= expected
        if complete and not self._ended:
            self._end_step(optimizer, index, skipped=skipped)
        else:
            self._clear_update()
            self.stop.check()

    # -- steps ------------------------------------------------------------------------

    def _next_step_if_ended(self, *, attempt: bool = False) -> None:
        """Begin the next step, unless optimizers that have not stepped yet may still belong to this one."""
        if not self._ended:
            return
        known = len(self._index)
        if attempt or not known or len(self._attempted) >= max(known, self._living):
            if self._attempted:
                self._expected = self._attempted
            self._attempted = set()
            self._begin_step()
            if EventKind.STEP_START in self.session.wanted:
                self._emit(EventKind.STEP_START)

    def _end_step(self, optimizer: Any, index: int, **facts: Any) -> None:
        """The step is over; ``facts`` are what else is known of it, by their names in an event."""
        self._ended = True
        loads, self.unmatched_loads = self.unmatched_loads, []
        inner, self._inner_gradients = self._inner_gradients, None
        facts |= {"unmatched_loads": loads, "inner_gradients": inner, "held_back": self._held_back()}
        self._emit_update(EventKind.STEP_END, optimizer, index, **facts)
        self._batch = None
        self._clear_update()
        self._check_limits()
        self.stop.check()

    def _held_back(self) -> dict[int, Any] | None:
        gate = self.controls.gate
        return None if gate is None else gate.held_back(self._begun)

    def _emit_update(self, kind: EventKind, optimizer: Any, index: int, **facts: Any) -> None:
        """Tell what is known of the update at hand, if anybody wants it."""
        if kind not in self.session.wanted:
            return
        self._emit(
            kind,
            optimizer=optimizer,
            optimizer_index=index,
            grad_norm=self._grad_norm,
            max_norm=self._max_norm,
            clipped_scaled=self._clipped_scaled,
            clipped=self._clipped,
            loss_scale=self._loss_scale,
            batch=self._batch,
            kept_gradients=self._kept_gradients,
            max_steps=self.session.settings.get("max_steps") or self.max_steps,
            **facts,
        )
