"""Which step is under way, and the events that carry its number."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from healthcheck.events import Event, EventKind
from healthcheck.trainers.agreement import agreement_of
from healthcheck.trainers.guarding import guarded
from healthcheck.trainers.modelview import FoundModel
from healthcheck.trainers.steps.phases import Phases

if TYPE_CHECKING:
    from healthcheck.session import Session


class StepCount:
    """Numbers the steps of one run, from its first event to its last; what a step is, subclasses know."""

    def __init__(self, session: Session, view: FoundModel) -> None:
        self.session = session
        self.view = view
        self.phases = Phases(self)
        self.started = False
        self.last_attempt = session.step
        self._first_step = session.step
        self._begun = session.step
        """Number of the step that is under way or has just ended."""
        self._ended = True
        self.epoch: float | None = None
        """Epoch, where a framework tells it."""
        self.max_steps: int | None = None
        """Length of the run, where a framework tells it."""
        self.saves_told = False
        """True while a framework announces its checkpoints itself."""
        self.before_first: Callable[[], None] | None = None
        """Called once, before anything of the first step is told."""
        self._saved: tuple[int, str] | None = None

    def start_at(self, step: int) -> None:
        """The run goes on after ``step`` updates that were made before (a resume). Before the first event."""
        self._first_step = self._begun = self.last_attempt = step

    def start(self) -> None:
        """Begin now, if it has not begun: a framework knows before the first backward pass."""
        if not self.started:
            self._start()

    @property
    def step(self) -> int:
        """The step that is under way, or the last one between two steps; 1 before the first."""
        return max(self._begun, 1)

    def _start(self) -> None:
        self._prepare()
        self.started = True
        self._look_around()
        agreement = guarded(self.session, agreement_of, self.session)
        if agreement is not None:
            self.session.agree_through(agreement)
        self._announce()

    def _announce(self) -> None:
        """A training begins; a process may make several."""
        if self.session.wants(EventKind.TRAIN_START):
            step = self._begun + 1 if self._ended else self._begun
            event = Event(EventKind.TRAIN_START, step, epoch=self.epoch, model=self.view, max_steps=self.max_steps)
            self.session.emit(event)

    def _look_around(self) -> None:
        """Get to know what there is to train, before the first event."""

    def _prepare(self) -> None:
        prepare, self.before_first = self.before_first, None
        if prepare is not None:
            guarded(self.session, prepare)

    def _begin_step(self) -> None:
        if self.before_first is not None:
            self._prepare()
        self._ended = False
        self._begun += 1
        self.session.begin_step(self._begun)

    def _check_limits(self) -> None:
        """``max_steps`` and ``max_time``: the user's own end, at a step boundary."""
        session = self.session
        most = session.settings.get("max_steps")
        seconds = session.settings.get("max_time")
        made = self._begun - self._first_step
        reason = ""
        if most and made >= int(most):
            reason = f"asked for {int(most):,} steps"
        elif seconds and session.info.world_size == 1 and _elapsed(session) >= float(seconds):
            reason = f"asked for {float(seconds):g} s"
        if reason and session.controls is not None:
            session.controls.request_stop(reason, rule="", step=self._begun, mode="graceful", exit_code=0)

    def checkpoint_saved(self, path: str) -> None:
        """A file was written. The files of one step in one folder are one checkpoint."""
        step = max(self.last_attempt, self._first_step)
        place = (step, os.path.dirname(os.path.abspath(path)))
        if (
            not self.saves_told
            and self.started
            and place != self._saved
            and self.session.wants(EventKind.CHECKPOINT_SAVED)
        ):
            self._saved = place
            self.session.emit(Event(EventKind.CHECKPOINT_SAVED, step, model=self.view, path=path))

    def finish(self) -> None:
        """The run is over: hand out what is still held back. Never raises a stop."""
        session = self.session
        judged = session.engine.step
        with contextlib.suppress(BaseException):
            self.phases.end()
        # Batches and results of an evaluation are told in step 1, also where nothing was trained.
        session.step = max(self.last_attempt, self._first_step) if self.started else min(session.step, judged)

    # -- emitting ---------------------------------------------------------------------

    def _emit(self, kind: EventKind, **facts: Any) -> None:
        if capturing():  # what we launch would become a part of the script's graph, and be replayed with it
            return
        session = self.session
        session.emit(
            Event(kind, self._begun, epoch=self.epoch, user_state=session.user_state, model=self.view, **facts)
        )


def _elapsed(session: Session) -> float:
    return session.clock.monotonic() - session.active.started


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream. Asked several times a step."""
    global _capturing
    if _capturing is None:
        torch = sys.modules.get("torch")
        if torch is None:
            return False
        if not torch.version.cuda and not torch.version.hip:
            _capturing = bool  # nothing to ask: no
        elif torch.cuda.is_initialized():
            _capturing = torch._C._cuda_isCurrentStreamCapturing
        else:
            return False
    return bool(_capturing())


_capturing: Callable[[], bool] | None = None
"""How CUDA is asked, once it is in use in this process."""


def _forget_capturing() -> None:
    global _capturing
    _capturing = None


if hasattr(os, "register_at_fork"):  # a forked child cannot use CUDA
    os.register_at_fork(after_in_child=_forget_capturing)
