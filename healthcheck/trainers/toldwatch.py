"""The watch of a framework that tells its steps itself, alone or inside a run that is watched already."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from healthcheck.outcome import Ending
from healthcheck.protocols import Capabilities
from healthcheck.trainers import current
from healthcheck.trainers.controls import TorchControls
from healthcheck.trainers.native import NativeWatch
from healthcheck.trainers.nativecontrols import NativeControls
from healthcheck.trainers.opening import SessionOptions
from healthcheck.trainers.patching import AfterImport
from healthcheck.trainers.script.hooks import TorchHooks
from healthcheck.trainers.source import TorchSource
from healthcheck.trainers.steps.told import ToldLosses, ToldSteps
from healthcheck.trainers.steps.training import TrainingSteps

if TYPE_CHECKING:
    from healthcheck.session import Session


class ToldWatch(NativeWatch):
    """Steps are those of the framework, also under ``healthcheck run``: there the script's own count rests.

    :param hooked: look at torch's optimizers and backward passes too, for what can only be seen
        before an update.
    """

    told: ToldSteps | None = None

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
        self._wake: Callable[[], None] | None = None

    def begin(self, make_controls: Callable[[TorchControls], NativeControls], **given: Any) -> bool:
        """As :meth:`NativeWatch.begin`."""
        running = self.given or current.current()
        source: TorchSource | None = None if running is None else current.source_of(running)
        if self.active or source is None or not source.shared:
            return super().begin(make_controls, **given)
        if source.watch is not None and source.watch.active:
            return False  # a second callback of one trainer
        assert running is not None
        source.shared = False  # for the time of the call: our hooks take the place of the script's
        only = source.steps.only
        try:
            begun = super().begin(make_controls, **given)
        finally:
            source.shared = True
        rested = _rest(source.steps)

        def wake() -> None:
            rested()
            source.steps.only = only
            waiting = source.steps.before_first

            def script_trains() -> None:
                """Only then: a script that ends here has been this framework's run."""
                if running.controls is not None and running.report is None:
                    running.controls.take_over(source.controls)
                if waiting is not None:
                    waiting()

            source.steps.before_first = script_trains

        self._wake = wake
        return begun

    def end(self, ending: Ending | None = None) -> None:
        super().end(ending)
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def step_aside(self) -> None:
        """Training is over, results may still come: let others watch this process meanwhile."""
        if self._ours and self.session is not None:
            current.leave(self.session)

    def losses_weigh(self, weight: float) -> None:
        """Micro-batch losses that are differentiated are to be added up, each times ``weight``."""
        if self.told is not None:
            self.told.losses = ToldLosses(weight)

    def _own_source(self, session: Session, model: Any, optimizers: list[Any], *, hooked: bool) -> TorchControls:
        base = super()._own_source(session, model, optimizers, hooked=False)
        assert self.steps is not None and self._patches is not None
        self.steps = self.told = ToldSteps(session, self.steps.view, base, only=optimizers)
        source = current.source_of(session)
        if self._ours and source is not None:
            source.steps = self.steps
        if hooked and self._hooked:
            TorchHooks(self.steps, self._patches, AfterImport(session.monitor_error, self._patches)).install()
        return base


def _rest(steps: TrainingSteps) -> Callable[[], None]:
    """Make a watched script's own count deaf to what torch does; returns what wakes it again."""
    phases = steps.phases
    before = (phases.told, phases.evaluating, steps.saves_told)
    phases.told = phases.evaluating = steps.saves_told = True
    steps.only = weakref.WeakSet()
    steps.backward_depth += 1

    def wake() -> None:
        phases.told, phases.evaluating, steps.saves_told = before
        steps.backward_depth -= 1

    return wake


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
