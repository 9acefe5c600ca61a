"""Loops with an ``accelerate.Accelerator``: ``health.attach(accelerator)``, or by itself under ``healthcheck run``.

Accelerate has no callbacks; the loop is the user's own. What is added to the torch hooks: metrics and
alerts in the trackers, ``save_state`` with the detectors' state beside it, and the cross-rank trigger
as the graceful stop, for loops that ask ``accelerator.check_trigger()``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthcheck.core.errors import UsageError
from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Capabilities
from healthcheck.instrument.controls import GAPS, SCRIPT_EVENTS, TorchControls
from healthcheck.instrument.patching import Patches
from healthcheck.instrument.saved_state import new_checkpoint
from healthcheck.run.ending import Ending
from healthcheck.run.opening import SessionOptions
from healthcheck.trainers.native import Forwarded, NativeControls, NativeWatch, read_state, write_state

if TYPE_CHECKING:
    from healthcheck.run.session import Session

CAPABILITIES = Capabilities(
    trainer="accelerate",
    events=SCRIPT_EVENTS,
    controls=frozenset({"stop", "skip_update", "checkpoint", "scale_lr", "log"}),
    gaps=GAPS,
)

LOG_PREFIX = "healthcheck/"

_adapters: weakref.WeakKeyDictionary[Any, AccelerateAdapter] = weakref.WeakKeyDictionary()


class AccelerateControls(NativeControls):
    """Stops through the trigger where the loop asks for it, else by an exception from the step."""

    def __init__(self, base: TorchControls, owner: AccelerateAdapter) -> None:
        super().__init__(base, CAPABILITIES)
        self._owner = owner

    def request_stop(self, reason: str, *, rule: str, step: int, mode: str = "graceful", exit_code: int = 1) -> None:
        if self._owner.heeds:
            super().request_stop(reason, rule=rule, step=step, mode=mode, exit_code=exit_code)
        else:
            self.base.request_stop(reason, rule=rule, step=step, mode=mode, exit_code=exit_code)

    def end_loop(self, reason: str) -> None:
        self._owner.accelerator.set_trigger()

    def save(self, path: Path | None) -> str:
        return self._owner.save(path)

    def schedulers(self) -> Iterable[Any]:
        return list(self._owner.accelerator._schedulers)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._owner.track(metrics, step)


class AccelerateAdapter:
    """Watches one Accelerator; made by :func:`attach`."""

    capabilities = CAPABILITIES

    def __init__(self, accelerator: Any, session: Session | None, options: SessionOptions, *, heeds: bool) -> None:
        self.accelerator = accelerator
        self.watch = NativeWatch(options, CAPABILITIES, session, patience=0)
        self.heeds = heeds
        """Whether the loop asks if it should end, so that the stop need not be raised."""
        self._forwarded = Forwarded()
        self._resume: dict[str, Any] | None = None
        self._tracking = False
        self._listening: Callable[[], None] | None = None
        self._patches = Patches()
        for name, make in (
            ("backward", self._backward),
            ("accumulate", self._accumulate),
            ("check_trigger", self._check_trigger),
            ("log", self._log),
            ("save_state", self._save_state),
            ("load_state", self._load_state),
            ("end_training", self._end_training),
        ):
            self._patches.replace(accelerator, name, make)

    def close(self) -> None:
        """Detach; the session ends here if it is our own."""
        if self._listening is not None:
            self._listening()
            self._listening = None
        self._patches.restore()
        self.watch.end(Ending())
        _adapters.pop(self.accelerator, None)

    def _begin(self) -> None:
        """At the first backward pass: by then everything has been prepared."""
        accelerator, state = self.accelerator, self._resume
        self.watch.begin(
            lambda base: AccelerateControls(base, self),
            model=accelerator._models[0] if accelerator._models else None,
            optimizers=list(accelerator._optimizers),
            step=int(state["step"]) if state else 0,
            state=state,
            announces=False,
        )
        session = self.watch.session
        if self.watch.active and session is not None:
            self._forwarded = Forwarded(session.alerts)
            self._listening = session.on(EventKind.STEP_END, self._step_ended)

    # -- what is wrapped --------------------------------------------------------------

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def backward(loss: Any, **kwargs: Any) -> Any:
            if self._patches.active and not self.watch.active:
                self.watch.guard(self._begin)
            return original(loss, **kwargs)

        return backward

    def _accumulate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def accumulate(*models: Any) -> Any:
            if self._patches.active:
                self.watch.guard(self.watch.step_begins)
            return original(*models)

        return accumulate

    def _check_trigger(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def check_trigger() -> bool:
            self.heeds = True
            return bool(original())

        return check_trigger

    def _log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def log(values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> Any:
            if self._patches.active and self.watch.active and not self._tracking:
                values = self.watch.guard(self._with_ours, values) or values
            return original(values, step=step, **kwargs)

        return log

    def _save_state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save_state(output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
            machine = self.watch.machine
            if not self._patches.active or not self.watch.active or machine is None:
                return original(output_dir, *args, **kwargs)
            machine.events.saves_announced = True
            try:
                folder = original(output_dir, *args, **kwargs)
            finally:
                machine.events.saves_announced = False
            self.watch.guard(self._saved, folder or output_dir)
            return folder

        return save_state

    def _load_state(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load_state(input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
            result = original(input_dir, *args, **kwargs)
            if self._patches.active and input_dir is not None:
                self._resume = read_state(input_dir, int(self.accelerator.process_index))
            return result

        return load_state

    def _end_training(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def end_training(*args: Any, **kwargs: Any) -> Any:
            self.watch.end(Ending())
            return original(*args, **kwargs)

        return end_training

    # -- what is done -----------------------------------------------------------------

    def _step_ended(self, event: Event) -> None:
        """One step late, so that the trackers get alerts that the step's own end brought."""
        session = self.watch.session
        if session is None:
            return
        news = self._forwarded.news(session.alerts)
        if news:
            self.track(news, event.step)

    def track(self, metrics: Mapping[str, float], step: int) -> None:
        """Send metrics to the trackers, if there are any."""
        if not self.accelerator.trackers or not self.watch.forwards:
            return
        prefix = self._prefix()
        self._tracking = True
        try:
            self.accelerator.log({f"{prefix}{name}": value for name, value in metrics.items()}, step=step)
        finally:
            self._tracking = False

    def _prefix(self) -> str:
        session = self.watch.session
        return str((session.settings.get("log_prefix") if session is not None else "") or LOG_PREFIX)

    def _with_ours(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the loop logs is heard; what we have measured goes along."""
        machine = self.watch.machine
        if machine is not None and not self.watch.shared:  # a watched script hears its loggers itself
            machine.evaluations.logged(values)
        if not self.watch.forwards:
            return dict(values)
        prefix = self._prefix()
        return {**{f"{prefix}{name}": value for name, value in self.watch.metrics_to_log().items()}, **values}

    def save(self, path: Path | None) -> str:
        """Save now: before the update, the weights are those of the step before."""
        session, machine = self.watch.session, self.watch.machine
        if session is None or machine is None:
            raise UsageError("training has not begun")
        path = new_checkpoint(session, path, f"step-{machine.step}")
        self.accelerator.save_state(str(path))
        return str(path)

    def _saved(self, folder: str | None) -> None:
        if folder is None:
            return
        self.watch.emit(EventKind.CHECKPOINT_SAVED, path=str(folder))
        state = self.watch.state()
        if state is not None and os.path.isdir(folder):
            write_state(folder, state, int(self.accelerator.process_index))


def attach(
    accelerator: Any, session: Session | None = None, *, heeds: bool = False, **options: Any
) -> AccelerateAdapter:
    """Watch the loop of an Accelerator. A second call returns the first one's adapter.

    :param heeds: the loop asks ``should_stop`` or ``check_trigger()``: a stop waits for it to end, and
        is raised from the next step only. Found out by itself for ``check_trigger()``.
    """
    known = _adapters.get(accelerator)
    if known is None:
        known = AccelerateAdapter(accelerator, session, SessionOptions(**options), heeds=heeds)
        _adapters[accelerator] = known
    else:
        known.watch.forwards = True  # under `healthcheck run` it was there already, and quiet
    return known
