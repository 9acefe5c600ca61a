"""What all framework adapters share: one session and one set of torch hooks, with the framework's own
knowledge on top.

Losses, gradients and updates are seen in one way only, through :class:`TrainingSteps`. A framework
adds what torch cannot tell: epochs, evaluations and their data sets, checkpoints, the length of the
run, its own step number, and a graceful way to end.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from healthcheck.errors import HealthCheckError
from healthcheck.events import Event, EventKind
from healthcheck.outcome import Ending
from healthcheck.protocols import Capabilities
from healthcheck.trainers import current
from healthcheck.trainers.controls import TorchControls
from healthcheck.trainers.endings import ending_of
from healthcheck.trainers.guarding import passes_on
from healthcheck.trainers.modelview import FoundModel
from healthcheck.trainers.nativecontrols import NativeControls
from healthcheck.trainers.opening import SessionOptions, open_or_join, switched_off
from healthcheck.trainers.patching import AfterImport, Patches
from healthcheck.trainers.resume.check import ResumeCheck, normal_of
from healthcheck.trainers.resume.savedstate import inner_optimizer, read_state, resume, write_state
from healthcheck.trainers.script.hooks import TorchHooks
from healthcheck.trainers.source import TorchSource
from healthcheck.trainers.steps.training import TrainingSteps
from healthcheck.trainers.stopping import PATIENCE, StopSwitch

if TYPE_CHECKING:
    from healthcheck.session import Session
    from healthcheck.verdicts import Alert


class NativeWatch:
    """One framework's part in a session, from its train begin to its train end; may do so again.

    With a session that somebody else has opened (``healthcheck run``, ``watch``) it joins: then it
    neither opens hooks a second time nor ends the session.
    """

    def __init__(
        self,
        options: SessionOptions,
        capabilities: Capabilities,
        session: Session | None = None,
        *,
        patience: int = PATIENCE,
    ) -> None:
        self.options = options
        self.capabilities = capabilities
        self.session = session
        self.steps: TrainingSteps | None = None
        self.controls: NativeControls | None = None
        self.active = False
        """True between :meth:`begin` and :meth:`end`, if anybody wants to know anything."""
        self.shared = False
        """True if a watched script sees all optimizers, and we only add to it."""
        self.forwards = True
        """Whether our metrics and alerts go into the framework's own logger."""
        self.on_error: Callable[[str, BaseException], None] | None = None
        """Told about faults of ours instead of the session."""
        self._patience = patience
        self.given = session
        self._source: TorchSource | None = None
        self._ours = False
        self._only: weakref.WeakSet[Any] | None = None
        self._patches: Patches | None = None
        self._remove: list[Callable[[], None]] = []

    # -- begin and end ----------------------------------------------------------------

    def begin(
        self,
        make_controls: Callable[[TorchControls], NativeControls],
        *,
        model: Any,
        optimizers: Iterable[Any],
        step: int = 0,
        epoch: float | None = None,
        max_steps: int | None = None,
        state: Mapping[str, Any] | None = None,
        tells: bool = True,
        ranks: tuple[int, int] | None = None,
    ) -> bool:
        """The framework is about to train. True if this run is watched.

        :param step: updates that were made before (a resume).
        :param state: what :meth:`state` gave when the checkpoint was written, if it is there.
        :param tells: the framework announces evaluations and checkpoints, so that none is guessed.
        :param ranks: ``(rank, world size)`` where the framework knows better than the environment did
            when the session was opened (it starts the other ranks itself).

        Raises ``UsageError`` for rules with mistakes.
        """
        if switched_off() or self.active:
            return self.active
        if self.given is not None:
            self.session, self._ours = self.given, False
        else:
            self.session, self._ours = open_or_join(self.options, ranks)
        session = self.session
        if ranks is not None and ranks[1] > session.info.world_size:
            session.info.rank, session.info.world_size = ranks
        source = current.source_of(session)
        if source is not None and source.watch is not None and source.watch.active:
            return False  # a second callback of one trainer: it hears, and is counted once
        watching = session.watching
        chosen = [inner_optimizer(o) for o in optimizers]
        self.shared = source is not None and source.shared
        if self.shared:
            self.steps, base = source.steps, source.controls
            self._only, self.steps.only = self.steps.only, weakref.WeakSet(chosen)
        else:
            if source is not None:
                source.steps.only = weakref.WeakSet()  # a loop around us: its optimizers are ours now
            base = self._own_source(session, model, chosen, hooked=watching)
        self._source = source
        if source is not None:
            source.watch = self
        assert self.steps is not None
        self.controls = make_controls(base)
        self.controls.engaged = True
        session.bind(self.controls)
        if step > self.steps.last_attempt:
            self._resume(step, state)
        if not watching:
            return False
        self.active = True
        self.steps.phases.end()
        self.steps.phases.told = self.steps.saves_told = tells
        before = self.steps.last_attempt - step
        self.steps.epoch, self.steps.max_steps = epoch, max_steps and max_steps + before
        self._remove = [session.on(EventKind.STEP_END, self._step_ended)]
        if self.steps.started:
            self._begin_another(before)
        else:
            self.steps.start()
        return True

    def _begin_another(self, before: int) -> None:
        """A run may train several times: folds, trials, stages. Its steps are counted on."""
        assert self.session is not None and self.steps is not None and self._source is not None
        if before > 0 and not self._source.several:
            self._source.several = True
            self.session.note(f"another training begins; steps are counted on: its step 1 is step {before + 1:,} here")
        self.steps.begin_anew()

    def _own_source(self, session: Session, model: Any, optimizers: list[Any], *, hooked: bool) -> TorchControls:
        view = FoundModel([model] if model is not None else ())
        base = TorchControls(session, view, StopSwitch(session.stop), self.capabilities)
        self.steps = TrainingSteps(session, view, base, only=optimizers)
        self._patches = Patches()
        if hooked:
            TorchHooks(self.steps, self._patches, AfterImport(session.monitor_error, self._patches)).install()
        if self._ours:
            current.enter(session, TorchSource(self.steps, base, watch=self))
            atexit.register(self._at_exit)
        return base

    def end(self, ending: Ending | None = None) -> None:
        """The framework has trained, or failed to. Safe to call twice; ends the session if it is ours."""
        session, steps = self.session, self.steps
        if session is None or steps is None or self.controls is None or not self.controls.engaged:
            return
        if os.getpid() != session.pid:
            return
        self.controls.engaged = False
        self.active = False
        if self._source is not None:
            self._source.watch = None
        while self._remove:
            self._remove.pop()()
        steps.finish()
        steps.phases.told = steps.saves_told = False
        if self.shared:
            steps.only = self._only
        session.stop.by_framework = False
        if self._patches is not None:
            self._patches.restore()
        if self._ours:
            atexit.unregister(self._at_exit)
            current.leave(session)
            session.finish(ending or Ending())

    def _at_exit(self) -> None:
        """Nobody said that training was over: the process ends, by an exception perhaps."""
        self.end(ending_of(getattr(sys, "last_value", None)))

    # -- events -----------------------------------------------------------------------

    def emit(self, kind: EventKind, **facts: Any) -> None:
        """One event that torch cannot tell, in the step that is under way or has just ended."""
        if not self.active or self.session is None or self.steps is None or not self.session.wants(kind):
            return
        step = max(self.steps.last_attempt, 1)
        facts.setdefault("epoch", self.steps.epoch)
        self.session.emit(Event(kind, step, model=self.steps.view, max_steps=self.steps.max_steps, **facts))

    def evaluation_begins(self, kind: EventKind = EventKind.EVAL_START, **facts: Any) -> None:
        """A pause of training, unless one has begun."""
        if self.active and self.steps is not None and not self.steps.phases.evaluating:
            self.steps.phases.evaluating = True
            self.emit(kind, phase=_phase(kind), **facts)

    def evaluation_ends(self, kind: EventKind = EventKind.EVAL_END, **facts: Any) -> None:
        """Its results are there. Several data sets in one pause: once for each."""
        if self.active and self.steps is not None:
            self.steps.phases.evaluating = False
            self.emit(kind, phase=_phase(kind), **facts)

    def _step_ended(self, event: Event) -> None:
        """A framework that does not heed the stop for a few steps is ended by an exception."""
        stop = self.session.stop if self.session is not None else None
        if stop is None or stop.request is None or not stop.by_framework:
            return
        if event.step - stop.request.step > self._patience:
            stop.by_framework = False

    @property
    def stop_pending(self) -> bool:
        return self.steps is not None and self.steps.stop.pending

    # -- faults of ours ---------------------------------------------------------------

    def guard(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call one of ours from inside the framework's loop; our own faults must not end it.

        Mistakes of the user, the deliberate stop, and what :func:`passes_on` says are raised.
        """
        try:
            return function(*given, **named)
        except HealthCheckError:
            raise
        except Exception as error:
            if self.session is not None and passes_on(self.session, error):
                raise
            name = getattr(getattr(function, "func", function), "__name__", "")
            if self.on_error is not None:
                self.on_error(name, error)
            elif self.session is not None:
                self.session.monitor_error(error, name)
            return None

    # -- resume -----------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Detector state as plain JSON values, to be kept beside a checkpoint; None if nothing is watched."""
        if not self.active or self.session is None or self.steps is None:
            return None
        normal = normal_of(self.session, self.steps.view.optimizers())
        return {"step": self.steps.last_attempt, **self.session.state_dict(), "normal": normal}

    def _resume(self, step: int, state: Mapping[str, Any] | None) -> None:
        assert self.session is not None and self.steps is not None
        self.steps.start_at(step)
        resume(self.session, step, state)
        if state is not None and self.session.watching:
            ResumeCheck(self.session, step, state.get("normal") or {}, None).listen()

    # -- results ----------------------------------------------------------------------

    @property
    def alerts(self) -> list[Alert]:
        """Alerts of the run so far, oldest first."""
        return [] if self.session is None else list(self.session.alerts)

    @property
    def report(self) -> dict[str, Any] | None:
        """Content of ``report.json``, once the session has ended."""
        return None if self.session is None else self.session.report

    def metrics_to_log(self, *, leave_out: Iterable[str] = ()) -> dict[str, float]:
        """The newest value of each metric without labels that makes a chart, for the framework's own logger."""
        return {} if self.session is None else self.session.history.charted(leave_out)


def _phase(kind: EventKind) -> str:
    return "test" if kind.value.startswith("test") else "eval"


__all__ = ["NativeWatch", "inner_optimizer", "read_state", "write_state"]
