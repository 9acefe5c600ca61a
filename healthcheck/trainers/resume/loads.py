"""Loads of a state dict into a module that change nothing, and say nothing of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from healthcheck.trainers.guarding import guarded

if TYPE_CHECKING:
    from healthcheck.trainers.script.hooks import TorchHooks
    from healthcheck.trainers.steps.training import TrainingSteps


def seen_loads(original: Callable[..., Any], hooks: TorchHooks) -> Callable[..., Any]:
    """``Module.load_state_dict`` that tells of loads that fitted nowhere, and of a module's own weights."""

    def load_state_dict(module: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if hooks.on and hooks.steps.started:
            guarded(hooks.steps.session, _own_loaded, hooks.steps, module, state_dict)
        result = original(module, state_dict, *args, **kwargs)
        if hooks.on:
            guarded(hooks.steps.session, _loaded, hooks.steps, module, state_dict, result)
        return result

    return load_state_dict


def _loaded(steps: TrainingSteps, module: Any, state: Any, result: Any) -> None:
    """With ``strict=False`` torch returns the names that it could not place, and goes on."""
    missing, unexpected = getattr(result, "missing_keys", ()), getattr(result, "unexpected_keys", ())
    if missing and unexpected and len(unexpected) == len(state):
        words = f"{len(state):,} names like {unexpected[0]}, where {missing[0]} was wanted"
        steps.unmatched_loads.append((weakref.ref(module), words))


LOOKED_AT = 8
"""Parameters that are compared with what is loaded into them, at even distances; and loads that wait to be told."""


def _own_loaded(steps: TrainingSteps, module: Any, state: Any) -> None:
    """``state_dict()`` hands out the tensors themselves: kept without a copy, they are trained on."""
    own = [(name, p) for name, p in module.named_parameters() if p.numel()]
    few = own[:: max(1, len(own) // LOOKED_AT)]
    if not few or not all(_same_memory(state.get(name), p) for name, p in few):
        return
    # At the end of the run, when it is told, the model may be gone.
    loads = steps.session.facts.own_loads
    if len(loads) < LOOKED_AT and any(m is module for _, m in steps.view.named_modules()):
        loads.append(f"{type(module).__name__}, {len(own):,} tensors")


def _same_memory(value: Any, parameter: Any) -> bool:
    if type(getattr(value, "data", None)) is not type(parameter.data) or value.device != parameter.device:
        return False
    return value.device.type != "meta" and bool(value.data_ptr() == parameter.data_ptr() != 0)
