"""What all framework adapters share: one session and one set of torch hooks, with the framework's own knowledge on top."""

from __future__ import annotations

import atexit
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import HealthCheckError
from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Capabilities, Device
from healthcheck.instrument.controls import PATIENCE, StopSwitch, TorchControls, ending_of, without_updates
from healthcheck.instrument.guarding import passes_on
from healthcheck.instrument.hooks import TorchHooks
from healthcheck.instrument.machine import StepMachine
from healthcheck.instrument.modelview import FoundModel
from healthcheck.instrument.patching import AfterImport, Patches
from healthcheck.instrument.resume_check import ResumeCheck, normal_of
from healthcheck.instrument.saved_state import inner_optimizer, read_state, resume, write_state
from healthcheck.instrument.sources import AnnouncedSource, TorchFeed
from healthcheck.instrument.step_events import EndedBy
from healthcheck.run import current
from healthcheck.run.ending import Ending
from healthcheck.run.joining import join
from healthcheck.run.opening import SessionOptions, open_here, switched_off

if TYPE_CHECKING:
    from healthcheck.core.alerts import Alert
    from healthcheck.run.session import Session


class NativeControls:
    """Implements :class:`healthcheck.core.protocols.Controls`; a framework's adapter fills in its own ways.

    While :attr:`engaged`, a stop asks the framework to end its loop and nothing is raised; outside
    its loop the stop is raised from the step, as in a plain script.
    """

    def __init__(self, base: TorchControls, capabilities: Capabilities) -> None:
        self.base = base
        self._capabilities = capabilities
        self.engaged = False

    @property
    def capabilities(self) -> Capabilities:
        """The framework's, less an update that its optimizer does not let us hold back."""
        known, base = self._capabilities, self.base.capabilities
        if "before_update" in base.gaps and "before_update" not in known.gaps:
            return without_updates(known, base.gaps["before_update"])
        if "skip_update" in base.controls or "skip_update" not in known.controls:
            return known
        gap = base.gaps.get("skip_update", "the optimizer does not let an update be held back")
        return replace(known, controls=known.controls - {"skip_update"}, gaps={**known.gaps, "skip_update": gap})

    @property
    def ranks_cannot_save(self) -> str:
        """Why several ranks cannot save together; empty where the framework does it."""
        return "" if self.engaged else self.base.ranks_cannot_save

    # -- what a framework fills in ----------------------------------------------------

    def end_loop(self, reason: str) -> None:
        """Ask the framework to end its loop at the next step boundary."""
        raise NotImplementedError

    def save(self, path: Path | None) -> str:
        """Have a checkpoint written at the next safe point; returns where. ``UsageError`` if that cannot be."""
        raise NotImplementedError

    def schedulers(self) -> Iterable[Any]:
        """Learning-rate schedulers that would undo a scaled rate."""
        return ()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    # -- Controls ---------------------------------------------------------------------

    @property
    def device(self) -> Device:
        return self.base.device

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str = "graceful", exit_code: int = 1) -> None:
        if self.engaged:
            self.base.stop.state.by_framework = True
            self.end_loop(reason)
        self.base.request_stop(reason, rule=rule, step=step, mode=mode, exit_code=exit_code)

    def skip_update(self) -> bool:
        return self.base.skip_update()

    def request_checkpoint(self, path: Path | None = None) -> str:
        return self.save(path) if self.engaged else self.base.request_checkpoint(path)

    def scale_lr(self, factor: float) -> list[float]:
        """Scales the schedulers' base rates too, so that their next step does not undo it."""
        rates = self.base.scale_lr(factor)
        for scheduler in self.schedulers():
            inner = getattr(scheduler, "scheduler", scheduler)
            if hasattr(inner, "base_lrs"):
                inner.base_lrs = [rate * factor for rate in inner.base_lrs]
        return rates


def scale_schedules(schedulers: Iterable[Any], factor: float) -> None:
    """Scale the bounds of Megatron's ``OptimizerParamScheduler``, which sets rates from them at each step."""
    for scheduler in schedulers:
        for name in ("init_lr", "max_lr", "min_lr"):
            value = getattr(scheduler, name, None)
            if isinstance(value, (int, float)):
                setattr(scheduler, name, value * factor)
        for group in getattr(getattr(scheduler, "optimizer", None), "param_groups", ()) or ():
            for name in ("max_lr", "min_lr"):
                if isinstance(group.get(name), (int, float)):
                    group[name] = group[name] * factor


class Forwarded:
    """Remembers how many of a run's alerts have been handed on."""

    def __init__(self, alerts: Sequence[Alert] = ()) -> None:
        self.count = len(alerts)

    def news(self, alerts: Sequence[Alert]) -> dict[str, float]:
        """``{"alert/loss-spike": 1.0}`` for those that came since the last call."""
        new = alerts[self.count :]
        self.count = len(alerts)
        return {f"alert/{alert.rule}": 1.0 for alert in new}


def mix_in(mixin: type, target: Any) -> None:
    """Give ``target`` the methods of ``mixin``, in front of those of its own class.

    Its class becomes a new one of the same name, which looks methods up as ``class Own(mixin, Own)`` would; other
    objects of the old class stay as they are. Does nothing where the mixin is there already.
    """
    kind = type(target)
    if issubclass(kind, mixin):
        return
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}

    class Ordered(type(kind)):  # type: ignore[misc]
        """Its classes have one base, ``kind``, and ask the mixin first.

        With the mixin as a base, Python refuses to change the class of an object whose own class inherits from a
        ``Protocol`` (torchtitan's Trainer does): the two would not keep their attributes in the same place.
        """

        def mro(cls) -> list[type]:
            own, *others = super().mro()
            return [own, *(base for base in mixin.__mro__ if base not in others), *others]

    mixed = types.new_class(kind.__name__, (kind,), {"metaclass": Ordered}, exec_body=lambda space: space.update(named))
    object.__setattr__(target, "__class__", mixed)  # classes that keep track of what is set need not see this


def joined(parts: Iterable[Any], name: str) -> Any:
    """One module for the parts of a model; with several, names begin with ``chunk0.``, ``chunk1.``, ...

    The parts stay as they are; the caller must keep what is returned.
    """
    import torch

    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    if len(modules) < 2:
        return modules[0] if modules else None
    return torch.nn.ModuleDict({f"{name}{i}": module for i, module in enumerate(modules)})


def listed(given: Any) -> list[Any]:
    """A framework's one thing, list of things, or None, as a list."""
    if given is None:
        return []
    return list(given) if isinstance(given, Sequence) else [given]


# --------------------------------------------------------------------------------------------------
# What all framework adapters share: one session and one set of torch hooks, with the framework's own
# knowledge on top.
#
# Losses, gradients and updates are seen in one way only, through the step machine. A framework adds what torch
# does not show: epochs, evaluations and their data sets, checkpoints, the length of the run, its own step
# number, and a graceful way to end.


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
        self.machine: StepMachine | None = None
        """The step machine that sees this framework's training; our own, or that of a watched script."""
        self.controls: NativeControls | None = None
        self.active = False
        """True between :meth:`begin` and :meth:`end`, if anybody wants to know anything."""
        self.shared = False
        """True if a watched script sees all optimizers, and we only add to it."""
        self.forwards = True
        """Whether our metrics and alerts go into the framework's own logger."""
        self.on_error: Callable[[str, BaseException], None] | None = None
        """Called with faults of ours instead of the session."""
        self._patience = patience
        self.given = session
        self.name = "the callback"
        """What messages call whoever watches."""
        self.only_its_own = False
        """Whether it stands for rules that it was made with, and for no others: none are looked for."""
        self.rules_beside: Callable[[Session], SessionOptions] = lambda session: self.options
        """What it asks for in a session that has rules already."""
        self._feed: TorchFeed | None = None
        """Of the session that was joined."""
        self._ours = False
        self._only: Iterable[Any] | None = None
        self._patches: Patches | None = None

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
        announces: bool = True,
        ranks: tuple[int, int] | None = None,
        peers: Sequence[NativeWatch] = (),
    ) -> bool:
        """The framework is about to train. True if this run is watched.

        :param step: updates that were made before (a resume).
        :param state: what :meth:`state` gave when the checkpoint was written, if it is there.
        :param announces: the framework announces evaluations and checkpoints, so that none is guessed.
        :param ranks: ``(rank, world size)`` where the framework knows better than the environment did
            when the session was opened (it starts the other ranks itself).
        :param peers: those of all callbacks of one trainer: their rules are one rule set before it trains.

        Raises ``UsageError`` for rules with mistakes.
        """
        if switched_off() or self.active:
            return self.active
        self.session = self.given or current.current()
        self._ours = self.session is None
        if self.session is None:
            # One that wrote no rules of its own asks for those that are found: the others' are layers over them.
            first = next((peer for peer in peers if not peer.only_its_own), self)
            self.session = open_here(first.options, ranks)
            self.session.layers.of_callbacks = first.only_its_own
        session = self.session
        for watch in (self, *peers):
            join(session, watch.rules_beside(session), watch.name)
        if ranks is not None and ranks[1] > session.info.world_size:
            session.info.rank, session.info.world_size = ranks
        feed = current.feed_of(session)
        if feed is not None and feed.framework is not None and feed.framework.active:
            return False  # a second callback of one trainer: it hears, and is counted once
        watching = session.watching
        chosen = [inner_optimizer(o) for o in optimizers]
        self.shared = feed is not None and feed.shared
        if self.shared:
            machine, base = feed.machine, feed.controls
            self._only = machine.optimizers.watch_only(chosen)
        else:
            if feed is not None:
                feed.machine.optimizers.watch_only(())  # a loop around us: its optimizers are ours now
            machine, base = self._own_machine(session, model, chosen, hooked=watching)
        self._feed, self.machine = feed, machine
        if feed is not None:
            feed.framework = self
        self.controls = make_controls(base)
        self.controls.engaged = True
        session.bind(self.controls)
        if step > machine.last_attempt:
            self._resume(machine, step, state)
        if not watching:
            return False
        self.active = True
        machine.evaluations.end()
        machine.evaluations.announce(announces)
        machine.events.saves_announced = announces
        before = machine.last_attempt - step
        machine.events.epoch, machine.events.planned = epoch, max_steps and max_steps + before
        session.stop.patience = self._patience
        if machine.started:
            self._begin_another(before)
        else:
            machine.start()
        return True

    def _begin_another(self, before: int) -> None:
        """A run may train several times: folds, trials, stages. Its steps are counted on."""
        assert self.session is not None and self.machine is not None and self._feed is not None
        if before > 0 and not self._feed.several:
            self._feed.several = True
            self.session.note(f"another training begins; steps are counted on: its step 1 is step {before + 1:,} here")
        self.machine.begin_anew()

    def _own_machine(
        self, session: Session, model: Any, optimizers: list[Any], *, hooked: bool, ended_by: EndedBy = EndedBy.UPDATES
    ) -> tuple[StepMachine, TorchControls]:
        """A step machine and the controls of what it sees.

        :param hooked: install hooks in torch, for as long as we watch.
        """
        view = FoundModel([model] if model is not None else ())
        base = TorchControls(session, view, StopSwitch(session.stop), self.capabilities)
        machine = StepMachine(session, view, base, only=optimizers, ended_by=ended_by)
        self._patches = Patches()
        if hooked:
            TorchHooks(machine, self._patches, AfterImport(session.monitor_error, self._patches)).install()
        if self._ours:
            current.enter(session, TorchFeed(machine, base, framework=self))
            atexit.register(self._at_exit)
        return machine, base

    def end(self, ending: Ending | None = None) -> None:
        """The framework has trained, or failed to. Safe to call twice; ends the session if it is ours."""
        session, machine = self.session, self.machine
        if session is None or machine is None or self.controls is None or not self.controls.engaged:
            return
        if os.getpid() != session.pid:
            return
        self.controls.engaged = False
        self.active = False
        if self._feed is not None:
            self._feed.framework = None
        machine.finish()
        machine.evaluations.announce(False)
        machine.events.saves_announced = False
        if self.shared:
            machine.optimizers.watch_only(self._only)
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
        """One event that torch does not show, in the step that is under way or has just ended."""
        machine = self.machine
        if not self.active or self.session is None or machine is None or not self.session.wants(kind):
            return
        step, planned = max(machine.last_attempt, 1), machine.events.planned
        facts.setdefault("epoch", machine.events.epoch)
        self.session.emit(Event(kind, step, model=machine.view, max_steps=planned, **facts))

    def in_epoch(self, epoch: float) -> None:
        """All events carry it from now on."""
        if self.active and self.machine is not None:
            self.machine.events.epoch = epoch

    def step_begins(self) -> None:
        """The framework is about to make the forward pass of the next step, which we count: its first micro-batch."""
        machine = self.machine
        if self.active and machine is not None and not machine.under_way and not machine.unwatched.left:
            machine.begin_step(wait=True, late=False)

    def trains_on(self, batch: Any) -> None:
        """The batch in use: loaders draw ahead."""
        if self.active and self.machine is not None:
            self.machine.events.batch = batch

    @property
    def evaluating(self) -> bool:
        """Whether training pauses for an evaluation."""
        return self.machine is not None and self.machine.evaluations.evaluating

    def evaluation_begins(self, kind: EventKind = EventKind.EVAL_START, **facts: Any) -> None:
        """A pause of training, unless one has begun."""
        if self.active and self.machine is not None and self.machine.evaluations.announced_begin():
            self.emit(kind, phase=_phase(kind), **facts)

    def evaluation_ends(self, kind: EventKind = EventKind.EVAL_END, **facts: Any) -> None:
        """Its results are there. Several data sets in one pause: once for each."""
        if self.active and self.machine is not None:
            found = self.machine.evaluations.announced_end()
            self.emit(kind, phase=_phase(kind), **{**found, **facts})

    @property
    def stop_pending(self) -> bool:
        return self.machine is not None and self.machine.stop.state.request is not None

    # -- faults of ours ---------------------------------------------------------------

    def guard(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call one of ours from inside the framework's loop; our own faults must not end it.

        Mistakes of the user, the deliberate stop, and what :func:`passes_on` says are raised.
        """
        try:
            return function(*given, **named)
        except Exception as error:
            self.failed(error, getattr(getattr(function, "func", function), "__name__", ""))
            return None

    def failed(self, error: Exception, name: str) -> None:
        """One of ours has failed where it was called, as in :meth:`guard`; raises the error again if it is to be raised."""
        if isinstance(error, HealthCheckError) or (self.session is not None and passes_on(self.session, error)):
            raise error
        if self.on_error is not None:
            self.on_error(name, error)
        elif self.session is not None:
            self.session.monitor_error(error, name)

    # -- resume -----------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """Detector state as plain JSON values, to be kept beside a checkpoint; None if nothing is watched."""
        machine = self.machine
        if not self.active or self.session is None or machine is None:
            return None
        normal = normal_of(self.session, machine.view.optimizers())
        return {"step": machine.last_attempt, **self.session.state_dict(), "normal": normal}

    def _resume(self, machine: StepMachine, step: int, state: Mapping[str, Any] | None) -> None:
        assert self.session is not None
        machine.start_at(step)
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


class AnnouncedWatch(NativeWatch):
    """The watch of a framework that announces its steps. They are its own, also under ``healthcheck run``: there the
    script's own machine pauses meanwhile.

    :param hooked: look at torch's optimizers and backward passes too, for what can only be seen
        before an update.
    """

    source: AnnouncedSource | None = None
    """What the framework announces its steps to."""

    def __init__(
        self,
        options: SessionOptions,
        capabilities: Capabilities,
        session: Session | None = None,
        *,
        hooked: bool = True,
    ) -> None:
        super().__init__(options, capabilities, session)
        self._hooked = hooked
        self._resume_script: Callable[[], None] | None = None

    def begin(self, make_controls: Callable[[TorchControls], NativeControls], **given: Any) -> bool:
        """As :meth:`NativeWatch.begin`."""
        running = self.given or current.current()
        feed: TorchFeed | None = None if running is None else current.feed_of(running)
        if self.active or feed is None or not feed.shared:
            return super().begin(make_controls, **given)
        if feed.framework is not None and feed.framework.active:
            return False  # a second callback of one trainer
        assert running is not None
        resume = feed.machine.pause()
        feed.shared = False  # for the time of the call: our hooks take the place of the script's
        try:
            begun = super().begin(make_controls, **given)
        except BaseException:
            resume()
            raise
        finally:
            feed.shared = True
        self._resume_script = lambda: _resume_script(running, feed, resume)
        return begun

    def end(self, ending: Ending | None = None) -> None:
        super().end(ending)
        resume, self._resume_script = self._resume_script, None
        if resume is not None:
            resume()

    def step_aside(self) -> None:
        """Training is over, results may still come: let others watch this process meanwhile."""
        if self._ours and self.session is not None:
            current.leave(self.session)

    def losses_weigh(self, weight: float) -> None:
        """Micro-batch losses that are differentiated are to be added up, each times ``weight``."""
        if self.machine is not None:
            self.machine.losses.weigh(weight)

    def _own_machine(
        self,
        session: Session,
        model: Any,
        optimizers: list[Any],
        *,
        hooked: bool,
        ended_by: EndedBy = EndedBy.FRAMEWORK,
    ) -> tuple[StepMachine, TorchControls]:
        hooked = hooked and self._hooked
        machine, base = super()._own_machine(session, model, optimizers, hooked=hooked, ended_by=ended_by)
        self.source = AnnouncedSource(machine)
        return machine, base


def _resume_script(session: Session, feed: TorchFeed, resume: Callable[[], None]) -> None:
    """The framework has trained; the script may train by itself afterwards."""
    resume()
    waiting = feed.machine.before_first

    def script_trains() -> None:
        """Only then: a script that ends here has been this framework's run."""
        if session.controls is not None and session.report is None:
            session.controls.take_over(feed.controls)
        if waiting is not None:
            waiting()

    feed.machine.before_first = script_trains


class WatchedResults:
    """Results of the run that :attr:`watch` is part of."""

    watch: NativeWatch

    def close(self) -> None:
        """End watching now, whatever the framework does; safe to call twice."""
        self._end(Ending())

    def _end(self, ending: Ending) -> None:
        self.watch.end(ending)

    @property
    def session(self) -> Session | None:
        return self.watch.session

    @property
    def alerts(self) -> list[Alert]:
        """Alerts so far, oldest first."""
        return self.watch.alerts

    @property
    def report(self) -> dict[str, Any] | None:
        """Content of ``report.json``, once training has ended."""
        session = self.session
        return None if session is None else session.report

    @property
    def exit_code(self) -> int:
        """What ``healthcheck run`` would exit with, once training has ended."""
        return int((self.report or {}).get("exit_code", 0))


def _phase(kind: EventKind) -> str:
    return "test" if kind.value.startswith("test") else "eval"


__all__ = ["AnnouncedWatch", "NativeWatch", "WatchedResults", "inner_optimizer", "read_state", "write_state"]
