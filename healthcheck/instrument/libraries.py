"""Libraries that train without an adapter of their own: a few places of each, shown to the step machine.

Torch shows losses, gradients and most updates of any library. What it does not show is where an epoch or an evaluation
begins and ends, what it came to, and updates of optimizers that are none of torch's. A library says that in a handful of
functions: each :class:`Place` names one, and what to make of a call of it. Tables of places are given by whoever registers
a trainer (:func:`healthcheck.extend.hookspecs.healthcheck_register_trainers`), as ``places`` of its ``attach``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.names import canonical_metric, is_evaluation
from healthcheck.instrument.guarding import guarded
from healthcheck.instrument.patching import AfterImport, Patches

if TYPE_CHECKING:
    from healthcheck.instrument.controls import TorchControls
    from healthcheck.instrument.hooks import TorchHooks
    from healthcheck.instrument.machine import StepMachine

Watching = Generator[Any, Any, None]


__all__ = ["Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """One function of a library that says something of a training.

    ``around(seen, *arguments)`` is a generator: what stands before its ``yield`` happens before the call, what stands
    after it afterwards, with the call's result as the value of ``yield``. It yields True to have the call left out.
    """

    module: str
    name: str
    """``Class.method``, or a function of the module."""
    around: Callable[..., Watching]


class ForeignOptimizer:
    """An optimizer that is none of torch's, as far as rules and actions need one: its parameters and rates.

    :param groups: reads them: ``[(parameters, rate), ...]``.
    :param set_rate: ``set_rate(group, rate)`` changes a rate.
    """

    def __init__(
        self,
        optimizer: Any,
        groups: Callable[[], Sequence[tuple[Sequence[Any], float]]],
        set_rate: Callable[[int, float], None],
    ) -> None:
        self.of = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self.state: dict[Any, Any] = {}
        self.defaults: dict[str, Any] = {}
        self.param_groups: list[dict[str, Any]] = []
        self._groups = groups
        self._set_rate = set_rate
        self._known: tuple[float, ...] = ()

    def refresh(self) -> None:
        """Before an update: what has been changed here is handed on, what the library has changed is taken over."""
        for number, (group, known) in enumerate(zip(self.param_groups, self._known, strict=True)):
            if group["lr"] != known:  # somebody has scaled it
                self._set_rate(number, float(group["lr"]))
        found = self._groups()
        if [len(parameters) for parameters, _ in found] != [len(group["params"]) for group in self.param_groups]:
            self.param_groups = [{"params": list(parameters), "lr": rate} for parameters, rate in found]
        for group, (parameters, rate) in zip(self.param_groups, found, strict=True):
            group["params"][:] = parameters
            group["lr"] = rate
        self._known = tuple(float(group["lr"]) for group in self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Its state is the library's to save."""
        return {"param_groups": [{"lr": group["lr"]} for group in self.param_groups]}


class Seen:
    """What a place may say. All of it is contained: nothing that goes wrong here ends a training."""

    def __init__(self, machine: StepMachine, hooks: TorchHooks, controls: TorchControls, library: str) -> None:
        self._machine = machine
        self._hooks = hooks
        self._controls = controls
        self._library = library
        self._optimizers: weakref.WeakKeyDictionary[Any, ForeignOptimizer] = weakref.WeakKeyDictionary()
        self.memory: dict[str, Any] = {}
        """For places of one library that belong together."""

    # -- epochs ---------------------------------------------------------------------------

    def epoch_begins(self, number: float) -> None:
        """An epoch of training, counted from 0."""
        self._know(EventKind.EPOCH_START, EventKind.EPOCH_END)
        self._machine.events.epoch = float(number)
        self._emit(EventKind.EPOCH_START, float(number))

    def epoch_ends(self, number: float) -> None:
        """The same is over."""
        self._emit(EventKind.EPOCH_END, float(number) + 1.0)

    # -- evaluations ----------------------------------------------------------------------

    def evaluation_begins(self) -> None:
        """Training pauses, unless it has not begun: then nothing is evaluated that a rule could judge."""
        if self._machine.started:
            self._machine.evaluations.begin()

    def evaluation_ends(self, results: Mapping[str, Any] | None = None) -> None:
        """Its results are there, under the library's names; those that say no phase are of the evaluation."""
        evaluations = self._machine.evaluations
        if not self._machine.started or evaluations.announced:
            return
        named = {}
        for given, value in (results or {}).items():
            name = canonical_metric(str(given))
            if _is_number(value):
                named[name if is_evaluation(name) else f"eval.{name}"] = value
        if named:
            evaluations.logged(named)
        evaluations.end()

    def logs(self, metrics: Mapping[str, Any]) -> None:
        """What the library logs of its training: rewards, entropies, parts of a loss."""
        known = {str(name): value for name, value in metrics.items() if _is_number(value)}
        if known and self._machine.started:
            self._machine.evaluations.logged(known)

    # -- updates --------------------------------------------------------------------------

    def updates_come(self) -> None:
        """The library has made an optimizer of its own: a backward pass is no step, whatever torch knows."""
        self._machine.unattempted = None

    def update_begins(
        self,
        optimizer: Any,
        groups: Callable[[], Sequence[tuple[Sequence[Any], float]]],
        set_rate: Callable[[int, float], None],
    ) -> bool:
        """An optimizer of the library is about to make an update; True if it is to be left out.

        :param groups: as for :class:`ForeignOptimizer`; ``set_rate`` too.
        """
        known = self._optimizers.get(optimizer)
        if known is None:
            known = self._optimizers[optimizer] = ForeignOptimizer(optimizer, groups, set_rate)
        known.refresh()
        self._hooks.update_begins(known, (known,), {})
        return self._machine.updates_withheld

    def update_ends(self, optimizer: Any) -> None:
        """The update was made, or left out."""
        known = self._optimizers.get(optimizer)
        if known is not None:
            self._hooks.update_ends(known, (known,), {})

    # -- inside -----------------------------------------------------------------------------

    def _know(self, *kinds: EventKind) -> None:
        """This run shows more than a plain script does."""
        known = self._controls.capabilities
        if not known.events.issuperset(kinds):
            gaps = {name: gap for name, gap in known.gaps.items() if name not in {kind.value for kind in kinds}}
            self._controls.capabilities = replace(
                known, trainer=self._library, events=known.events | set(kinds), gaps=gaps
            )

    def _emit(self, kind: EventKind, epoch: float) -> None:
        machine, session = self._machine, self._machine.session
        if machine.started and not machine.unwatched.left and session.wants(kind):
            session.emit(Event(kind, max(machine.last_attempt, 1), epoch=epoch, model=machine.view))


class Libraries:
    """Installs the places of all libraries that trainers name, each once its module is imported."""

    def __init__(self, machine: StepMachine, hooks: TorchHooks, controls: TorchControls) -> None:
        self._machine = machine
        self._hooks = hooks
        self._controls = controls

    def install(self, patches: Patches, imports: AfterImport) -> None:
        session = self._machine.session
        for name, attach in session.host.registry.trainers.items():
            places: Sequence[Place] = getattr(attach, "places", ())
            seen = Seen(self._machine, self._hooks, self._controls, name)
            for place in places:
                imports.when(place.module, functools.partial(self._put, place, seen, patches))

    def _put(self, place: Place, seen: Seen, patches: Patches, module: ModuleType) -> None:
        owner: Any = module
        *classes, name = place.name.split(".")
        for part in classes:
            owner = getattr(owner, part, None)
        if owner is not None and name in vars(owner):
            patches.replace(owner, name, lambda original: self._watched(original, place, seen, patches))

    def _watched(self, original: Callable[..., Any], place: Place, seen: Seen, patches: Patches) -> Callable[..., Any]:
        machine, session = self._machine, self._machine.session

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not patches.active or machine.paused:
                return original(*args, **kwargs)
            around = place.around(seen, *args, **kwargs)
            leave_out = guarded(session, next, around, None)
            try:
                result = None if leave_out is True else original(*args, **kwargs)
            except BaseException:
                guarded(session, around.close)
                raise
            guarded(session, _go_on, around, result)
            return result

        return watched


def _go_on(around: Watching, result: Any) -> None:
    try:
        around.send(result)
    except StopIteration:
        pass


def _is_number(value: Any) -> bool:
    """A number, a numpy scalar or a tensor with one element."""
    if isinstance(value, (bool, str)):
        return False
    shape = getattr(value, "shape", None)
    return isinstance(value, (int, float)) or (shape is not None and all(length == 1 for length in shape))
