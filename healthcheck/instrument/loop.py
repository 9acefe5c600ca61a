"""Your own loop, in a script or a notebook: ``with healthcheck.watch(model, optimizer) as health:``.

Three lines in the loop are enough::

    with healthcheck.watch(model, optimizer, rules="team.yaml") as health:
        for batch in data:
            ...
            optimizer.step()
            health.step(loss=loss)
            if health.should_stop:
                break
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import StopTraining, UsageError
from healthcheck.instrument.controls import StopSwitch, TorchControls, capabilities_of, ending_of
from healthcheck.instrument.guarding import guarded
from healthcheck.instrument.hooks import TorchHooks
from healthcheck.instrument.machine import StepMachine
from healthcheck.instrument.modelview import FoundModel
from healthcheck.instrument.patching import AfterImport, Patches
from healthcheck.instrument.saved_state import inner_optimizer
from healthcheck.instrument.sources import LoopSource, TorchFeed
from healthcheck.instrument.step_events import EndedBy
from healthcheck.run import current
from healthcheck.run.ending import Ending
from healthcheck.run.joining import join
from healthcheck.run.opening import SessionOptions, open_here, switched_off, takes_options

if TYPE_CHECKING:
    from healthcheck.core.alerts import Alert
    from healthcheck.run.session import Session

_open: list[weakref.ref[Loop]] = []


@takes_options
def watch(model: Any = None, optimizer: Any = None, **options: Any) -> Loop:
    """Watch a loop of your own. Use it in a ``with`` statement, or call ``close()`` at the end.

    :param model: module, or a list of modules: gives parameters their names.
    :param optimizer: torch optimizer, or a list: gradients are then judged before each update, and a
        bad update can be kept from happening. Without it only what ``step`` is given is judged.
    :param options: :class:`healthcheck.run.opening.SessionOptions` says what there is and what it means.
        ``rules``: path, pack name, dict of rules, YAML text, or a list of these; None finds the nearest
        ``healthcheck.yaml``, else the recommended pack. ``observe``: judge and report, never act. ``callbacks``: plugin
        objects, for instance of :class:`healthcheck.Callback`. ``name``: what reports call this run; the script's name
        by default. ``console=False`` keeps stderr quiet, ``record=False`` writes no run folder.

    A second ``watch`` of the same model or optimizer replaces the first. Under ``healthcheck run``
    it joins the run that watches already. With ``HEALTHCHECK=off`` it does nothing.

    Raises ``UsageError`` (``RuleFileError`` with all mistakes) before anything is attached, ``TypeError`` for an
    option that there is not.
    """
    chosen = SessionOptions(**options)
    modules, optimizers = _listed(model), [_unwrapped(o) for o in _listed(optimizer)]
    if switched_off():
        return Loop(None)
    running = current.current()
    for loop in [ref() for ref in _open]:
        if loop is not None and loop.watches(modules, optimizers):
            loop.close()
            running = current.current()
    if running is not None and not _is_loop(running):
        join(running, chosen, "watch()")
        return Loop(running, joined=True)
    return Loop(open_here(chosen), modules, optimizers)


class Loop:
    """A watched loop; made by :func:`watch`."""

    def __init__(
        self,
        session: Session | None,
        modules: Iterable[Any] = (),
        optimizers: Iterable[Any] = (),
        *,
        joined: bool = False,
    ) -> None:
        self.session = session
        self.joined = joined
        self._asked_to_stop = False
        """Whether the loop had the chance to see that it should stop."""
        self._source: LoopSource | None = None
        self._patches = Patches()
        self._adapters: list[Any] = []
        if session is not None and not joined:
            self._begin(session, list(modules), list(optimizers))

    def _begin(self, session: Session, modules: list[Any], optimizers: list[Any]) -> None:
        view = FoundModel(modules)
        # Never raised from inside an optimizer: the loop is asked to end first, and `insist` comes later.
        self._stop = StopSwitch(session.stop, deferred=True)
        gaps = (
            {}
            if optimizers
            else dict.fromkeys(("before_update", "after_update", "backward_end", "skip_update"), _BLIND)
        )
        controls = TorchControls(session, view, self._stop, capabilities_of("loop", {**LOOP_GAPS, **gaps}))
        session.bind(controls)
        machine = StepMachine(session, view, controls, only=optimizers, ended_by=EndedBy.LOOP)
        source = self._source = LoopSource(machine)
        if session.watching:
            hooks = TorchHooks(machine, self._patches, AfterImport(session.monitor_error, self._patches), source)
            if optimizers:
                hooks.watch(optimizers, sys.modules["torch"], passes=source.needs_passes(len(optimizers)))
        current.enter(session, TorchFeed(machine, controls))
        _open.append(weakref.ref(self))
        atexit.register(self.close)

    # -- in the loop ------------------------------------------------------------------

    def step(
        self,
        *,
        loss: Any = None,
        losses: Mapping[str, Any] | None = None,
        tokens: int | None = None,
        samples: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Say that one update is over. Once per update, after ``optimizer.step()``.

        :param loss: of the whole step, not divided by anything; scalar tensor or number. A device
            tensor is taken without a wait.
        :param tokens: tokens in the step; ``samples`` likewise.
        :param metrics: values of your own, judged by rules under their names.

        Raises ``StopTraining`` if a stop was asked for and the loop has gone on for another step.
        """
        if self.session is None or os.getpid() != self.session.pid:
            return
        source = self._source
        if source is None:
            if metrics and self.joined:
                self.session.log(metrics)
            return
        if self._adapters:  # a framework's adapter counts the steps
            if metrics:
                self.session.log(metrics)
            return
        if self._asked_to_stop:
            self._stop.insist()
        if self.session.watching:
            guarded(
                self.session,
                lambda: source.step(loss=loss, losses=losses, tokens=tokens, samples=samples, metrics=metrics),
            )
        self._asked_to_stop = self._stop.pending

    @property
    def should_stop(self) -> bool:
        """True once a rule (or ``max_steps``) asked for the end of the loop. Break out of it then."""
        return self.session is not None and self.session.stop.request is not None

    def log(self, **metrics: Any) -> None:
        """Feed metrics of your own to this loop's session."""
        if self.session is not None:
            self.session.log(metrics)

    def muted(self, rule: str, *, reason: str) -> AbstractContextManager[None]:
        """Inside this block a rule (or glob) is judged and recorded, but nothing is done about it."""
        return nullcontext() if self.session is None else self.session.muted(rule, reason=reason)

    def on(self, event: str, function: Callable[..., Any]) -> Callable[[], None]:
        """Call a function at every such event; returns its remover."""
        return (lambda: None) if self.session is None else self.session.on(event, function)

    def attach(self, target: Any) -> Any:
        """Attach to the trainer of a framework (an ``Accelerator``, ...). Returns its adapter.

        Raises ``UsageError`` for an object that no loaded plugin knows.
        """
        if self.session is None:
            return None
        adapter = self.session.attach(target)
        if hasattr(adapter, "heeds"):
            adapter.heeds = True  # this loop asks `should_stop`
        self._adapters.append(adapter)
        return adapter

    # -- results ----------------------------------------------------------------------

    @property
    def alerts(self) -> list[Alert]:
        """Alerts so far, oldest first."""
        return [] if self.session is None else list(self.session.alerts)

    def history(self, series: str, n: int = 200) -> list[tuple[int, float]]:
        """The last ``n`` values of a series as ``(step, value)``: ``history("loss")``."""
        return [] if self.session is None else self.session.history(series, n)

    @property
    def report(self) -> Mapping[str, Any] | None:
        """Content of ``report.json``, once the loop is closed. A notebook shows it as the page of the run."""
        if self.session is None or self.session.report is None:
            return None
        return ShownReport(self.session.report, self._repr_html_, repr(self))

    def __repr__(self) -> str:
        session = self.session
        if session is None:
            return "<healthcheck: off>"
        if session.report is not None:
            return f"<{self._view('line')}>"
        count = len(session.alerts)
        alerts = f"{count} alert{'s' if count > 1 else ''}" if count else "no alert so far"
        return f"<healthcheck: step {session.step:,}, {alerts}>"

    def _repr_html_(self) -> str | None:
        """What a notebook shows: the page of the run, as far as it has come."""
        return self._view("html") or None

    def _view(self, what: str) -> str:
        """``html`` or ``line`` of the report that shows runs; it is registered like any other."""
        view = self.session.host.registry.reports.get("notebook") if self.session is not None else None
        return str(getattr(view, what)(self.session)) if view is not None else ""

    @property
    def exit_code(self) -> int:
        """What ``healthcheck run`` would exit with, as things stand; for ``sys.exit`` at your script's end."""
        return 0 if self.session is None else self.session.exit_code()

    # -- end --------------------------------------------------------------------------

    def watches(self, modules: Sequence[Any], optimizers: Sequence[Any]) -> bool:
        """Whether this loop is about one of these objects."""
        if self._source is None:
            return False
        machine = self._source.machine
        mine = {id(root) for root in machine.view.roots()} | {id(o) for o in machine.optimizers.only or ()}
        return any(id(thing) in mine for thing in (*modules, *optimizers))

    def close(self, ending: Ending | None = None) -> None:
        """Detach everything and write the report. Safe to call twice."""
        if self.session is None or self._source is None or self.session.report is not None:
            return
        atexit.unregister(self.close)
        self._source.machine.finish()
        self._patches.restore()
        for adapter in self._adapters:
            guarded(self.session, adapter.close)
        current.leave(self.session)
        _open[:] = [ref for ref in _open if ref() not in (None, self)]
        self.session.finish(ending or Ending())

    def __enter__(self) -> Loop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.close(ending_of(error))
        # The end that the user asked for by max_steps is no error.
        return isinstance(error, StopTraining) and not error.rule


class ShownReport(dict[str, Any]):
    """``report.json`` as a dictionary that notebooks show as a page, and prompts in a line."""

    def __init__(self, report: Mapping[str, Any], page: Callable[[], str | None], line: str) -> None:
        super().__init__(report)
        self._page, self._line = page, line

    def __repr__(self) -> str:
        return self._line

    def _repr_html_(self) -> str | None:
        return self._page()


_BLIND = "watch() was given no optimizer"

LOOP_GAPS = {
    "loss_before_update": "a loop reports its loss after the update; updates are held back by the losses of its backward passes"
}
"""What a loop of one's own cannot show, whatever it gives to ``watch``."""


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _unwrapped(optimizer: Any) -> Any:
    """The torch optimizer inside a framework's wrapper."""
    optimizer = inner_optimizer(optimizer)
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise UsageError(f"watch() takes a torch optimizer, not a {type(optimizer).__name__}")
    return optimizer


def _is_loop(session: Session) -> bool:
    return any(loop is not None and loop.session is session for loop in (ref() for ref in _open))
