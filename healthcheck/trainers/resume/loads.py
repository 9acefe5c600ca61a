"""Loads of a state dict into a module that change nothing, and say nothing of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from healthcheck.trainers.guarding import guarded

if TYPE_CHECKING:
    from healthcheck.trainers.steps.machine import StepMachine


def seen_loads(original: Callable[..., Any], watching: Callable[[], StepMachine | None]) -> Callable[..., Any]:
    """``Module.load_state_dict`` that shows loads that fitted nowhere, and those of a module's own weights.

    :param watching: whom they are shown to; None while nobody watches.
    """

    def load_state_dict(module: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        machine = watching()
        if machine is not None and machine.started:
            guarded(machine.session, _own_loaded, machine, module, state_dict)
        result = original(module, state_dict, *args, **kwargs)
        machine = watching()
        if machine is not None:
            guarded(machine.session, _loaded, machine, module, state_dict, result)
        return result

    return load_state_dict


def _loaded(machine: StepMachine, module: Any, state: Any, result: Any) -> None:
    """With ``strict=False`` torch returns the names that it could not place, and goes on."""
    missing, unexpected = getattr(result, "missing_keys", ()), getattr(result, "unexpected_keys", ())
    if missing and unexpected and len(unexpected) == len(state):
        words = f"{len(state):,} names like {unexpected[0]}, where {missing[0]} was wanted"
        machine.load_unmatched(weakref.ref(module), words)


LOOKED_AT = 8
"""Parameters that are compared with what is loaded into them, at even distances; and loads that wait to be said."""


def _own_loaded(machine: StepMachine, module: Any, state: Any) -> None:
    """``state_dict()`` hands out the tensors themselves: kept without a copy, they are trained on."""
    own = [(name, p) for name, p in module.named_parameters() if p.numel()]
    few = own[:: max(1, len(own) // LOOKED_AT)]
    if not few or not all(_same_memory(state.get(name), p) for name, p in few):
        return
    # At the end of the run, when it is said, the model may be gone.
    known = machine.session.facts.own_loads
    if len(known) < LOOKED_AT and any(m is module for _, m in machine.view.named_modules()):
        known.append(f"{type(module).__name__}, {len(own):,} tensors")


def _same_memory(value: Any, parameter: Any) -> bool:
    if type(getattr(value, "data", None)) is not type(parameter.data) or value.device != parameter.device:
        return False
    return value.device.type != "meta" and bool(value.data_ptr() == parameter.data_ptr() != 0)
