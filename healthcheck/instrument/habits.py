"""Calls of torch that say something by how often they come, or with what: seeds set again and again, weights drawn after they
were loaded, samples without gradients, schedulers that wait.

Each is noted where it happens, with no work on a device, and judged by probes now and then.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from healthcheck.core.runinfo import PlateauUse
from healthcheck.device.tensors import on_host
from healthcheck.instrument.guarding import guarded
from healthcheck.instrument.modelview import parameters_of
from healthcheck.instrument.patching import AfterImport, Patches
from healthcheck.instrument.places import place_of

if TYPE_CHECKING:
    from healthcheck.instrument.machine import StepMachine

Function = Callable[..., Any]

_DRAWING = (
    "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_",
    "orthogonal_", "sparse_",
)  # fmt: skip
"""Of ``torch.nn.init``: those that draw, the inner ones among them are called by the outer."""
MOST = 4096
"""Parameters that are noted at most."""


class HabitHooks:
    """Replaces the functions. See the head of this file.

    :param watching: the machine of this process, None while nobody watches.
    """

    def __init__(self, watching: Callable[[], StepMachine | None]) -> None:
        self._watching = watching
        self._loaded: dict[int, Callable[[], Any]] = {}
        """Parameters that were loaded before training, by id: tensors cannot be compared."""

    def install(self, torch: ModuleType, patches: Patches, imports: AfterImport) -> None:
        """All of them; given back with the patches."""
        machine = self._watching()
        if machine is not None:
            machine.session.facts.habits.seen = True
        patches.replace(torch, "manual_seed", self._seed)
        patches.replace(torch.autograd, "grad", self._grad)
        for name in _DRAWING:
            patches.replace(torch.nn.init, name, self._draw)
        imports.when("torch.optim.lr_scheduler", lambda m: self._schedulers(patches, m))
        imports.when(
            "torch.optim.optimizer", lambda m: patches.replace(m.Optimizer, "load_state_dict", self._resumed) and None
        )
        imports.when("torch.distributions.normal", lambda m: self._distribution(patches, m.Normal))
        imports.when(
            "torch.utils.checkpoint",
            lambda m: patches.replace(m, "_checkpoint_without_reentrant_generator", self._recompute) and None,
        )

    def _distribution(self, patches: Patches, normal: Any) -> None:
        patches.replace(normal, "sample", self._sample)
        patches.replace(normal, "log_prob", self._score)

    # -- random numbers -----------------------------------------------------------------

    def _seed(self, original: Function) -> Function:
        def manual_seed(seed: Any) -> Any:
            machine = self._watching()
            if machine is not None and machine.started and isinstance(seed, int):
                habits = machine.session.facts.habits
                if habits.seed == seed:
                    habits.seeded += 1
                else:
                    habits.seed, habits.seeded = seed, 1
                    habits.seeded_at = place_of(sys._getframe(1))
            return original(seed)

        return manual_seed

    # Only functions may be in the closures of the two below: torch's compiler reads those of methods that it finds on objects
    # made inside of a graph, and breaks the graph at anything else.

    def _sample(self, original: Function) -> Function:
        from torch.compiler import is_compiling

        def note(distribution: Any, result: Any) -> None:
            machine = self._watching()
            if machine is not None and not machine.paused:
                guarded(machine.session, _drawn, machine, distribution, result)

        def sample(distribution: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(distribution, *args, **kwargs)
            if not is_compiling():
                note(distribution, result)
            return result

        return sample

    def _score(self, original: Function) -> Function:
        from torch.compiler import is_compiling

        def note(distribution: Any) -> None:
            machine = self._watching()
            if machine is not None and getattr(distribution.loc, "requires_grad", False):
                machine.session.facts.habits.scored = True

        def log_prob(distribution: Any, value: Any) -> Any:
            if not is_compiling():
                note(distribution)
            return original(distribution, value)

        return log_prob

    def _recompute(self, original: Function) -> Function:
        def checkpointed(fn: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any) -> Any:
            machine = self._watching()
            if machine is not None and not preserve_rng_state:
                guarded(machine.session, note_unkept, machine, fn)
            return original(fn, preserve_rng_state, *args, **kwargs)

        return checkpointed

    def _grad(self, original: Function) -> Function:
        from torch.compiler import is_compiling

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(outputs, inputs, *args, **kwargs)
            if not is_compiling():
                machine = self._watching()
                if machine is not None and machine.started and not machine.paused and not machine.in_pass:
                    guarded(machine.session, _asked_for_gradients, machine, inputs, result)
            return result

        return grad

    # -- weights ------------------------------------------------------------------------

    def note_loaded(self, machine: StepMachine, module: Any) -> None:
        """A module was given a state dict."""
        redrawn = machine.session.facts.habits.redrawn
        for parameter in module.parameters():
            redrawn.pop(id(parameter), None)
            if len(self._loaded) < MOST:
                self._loaded[id(parameter)] = weakref.ref(parameter)

    def _draw(self, original: Function) -> Function:
        from torch.compiler import is_compiling

        def draw(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                machine = self._watching()
                if machine is not None and (self._loaded or machine.started):
                    guarded(machine.session, self._note_drawn, machine, tensor)
            return original(tensor, *args, **kwargs)

        return draw

    def _note_drawn(self, machine: StepMachine, tensor: Any) -> None:
        redrawn = machine.session.facts.habits.redrawn
        # Those that have made an update; of another one the tensor may just be being made.
        stepped = machine.view.optimizers() if machine.started else ()
        by = next((o for o in stepped if any(p is tensor for p in parameters_of(o))), None)
        if by is None and self._loaded.get(id(tensor), _nothing)() is not tensor:
            return
        if len(redrawn) < MOST:
            redrawn[id(tensor)] = weakref.ref(tensor), None if by is None else weakref.ref(by)

    # -- schedules ----------------------------------------------------------------------

    def _schedulers(self, patches: Patches, module: Any) -> None:
        patches.replace(module.ReduceLROnPlateau, "step", self._plateau)
        for kind in [*vars(module).values()]:
            if isinstance(kind, type) and "load_state_dict" in vars(kind):
                patches.replace(kind, "load_state_dict", self._schedule_resumed)

    def _schedule_resumed(self, original: Function) -> Function:
        def load_state_dict(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            machine = self._watching()
            if machine is not None:
                guarded(machine.session, machine.session.facts.habits.resumed_schedules.add, scheduler)
            return original(scheduler, *args, **kwargs)

        return load_state_dict

    def _resumed(self, original: Function) -> Function:
        def load_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(optimizer, *args, **kwargs)
            machine = self._watching()
            if machine is not None:
                guarded(machine.session, _rate_resumed, machine, optimizer)
            return result

        return load_state_dict

    def _plateau(self, original: Function) -> Function:
        def step(scheduler: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
            before = [group["lr"] for group in scheduler.optimizer.param_groups]
            result = original(scheduler, metrics, *args, **kwargs)
            machine = self._watching()
            if machine is not None:
                guarded(machine.session, _waited, machine, scheduler, metrics, before)
            return result

        return step


def _nothing() -> None:
    """What a tensor that was not loaded refers to."""


LOWERED = 2 / 3
"""Part of the rate that a schedule began with at which it has come down, at the most."""


def _rate_resumed(machine: StepMachine, optimizer: Any) -> None:
    rates = machine.session.facts.habits.resumed_rates
    rates.pop(optimizer, None)
    rate, first = (optimizer.param_groups[0].get(key) for key in ("lr", "initial_lr"))
    if optimizer.state and isinstance(rate, float) and isinstance(first, float) and 0 < rate <= LOWERED * first:
        rates[optimizer] = rate, first


def _waited(machine: StepMachine, scheduler: Any, metrics: Any, before: list[Any]) -> None:
    plateaus = machine.session.facts.habits.plateaus
    use = plateaus.get(scheduler)
    if use is None:
        use = plateaus[scheduler] = PlateauUse()
    use.calls += 1
    known = isinstance(metrics, (int, float)) or (
        hasattr(metrics, "numel") and metrics.numel() == 1 and on_host(metrics)
    )
    value = float(metrics) if known else float("nan")
    if any(float(group["lr"]) < float(lr) for group, lr in zip(scheduler.optimizer.param_groups, before, strict=False)):
        use.reductions += 1
        if scheduler.mode == "max" and value < use.lowest and use.calls > 1:
            use.at_lowest += 1
    use.lowest = min(use.lowest, value) if value == value else use.lowest


def _asked_for_gradients(machine: StepMachine, inputs: Any, result: Any) -> None:
    """Gradients of something that is no parameter, without a graph."""
    first = inputs if hasattr(inputs, "shape") else next(iter(inputs), None)
    made = result[0] if isinstance(result, (tuple, list)) and result else None
    if made is None or first is None or made.requires_grad or type(first).__name__ == "Parameter":
        return
    machine.session.facts.habits.plain_gradients += 1


def _drawn(machine: StepMachine, distribution: Any, result: Any) -> None:
    import torch

    trained = any(getattr(part, "requires_grad", False) for part in (distribution.loc, distribution.scale))
    if trained and torch.is_grad_enabled() and not result.requires_grad:
        machine.session.facts.habits.drawn.append(weakref.ref(result))


def note_unkept(machine: StepMachine, function: Any) -> None:
    """A part of the model is computed again without its random state: does it have dropout that is on?"""
    habits = machine.session.facts.habits
    if not habits.unkept_random:
        habits.unkept_random = active_dropout(function)


def active_dropout(function: Any) -> str:
    """Which dropout is on in a module, or in the one that a method belongs to; empty if none."""
    from torch.nn.modules.dropout import _DropoutNd

    module = function if hasattr(function, "modules") else getattr(function, "__self__", None)
    if module is None or not hasattr(module, "modules"):
        return ""
    on = [m for m in module.modules() if isinstance(m, _DropoutNd) and m.training and m.p > 0]
    return f"{type(module).__name__} with dropout of {on[0].p:g}" if on else ""
