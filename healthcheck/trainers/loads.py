"""Loads of a state dict into a module, of which nobody reads what they return."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from healthcheck.trainers.guarding import guarded

if TYPE_CHECKING:
    from healthcheck.trainers.script_hooks import TorchHooks
    from healthcheck.trainers.steps import TrainingSteps


def seen_loads(original: Callable[..., Any], hooks: TorchHooks) -> Callable[..., Any]:
    """``Module.load_state_dict`` that tells the steps of loads that fitted nowhere."""

    def load_state_dict(module: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
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
