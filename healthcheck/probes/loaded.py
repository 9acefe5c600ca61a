"""State dicts that were loaded into the model and fitted nowhere: training starts from nothing and nobody says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.names import first_few
from healthcheck.protocols import Demand
from healthcheck.samples import Metric, Sample


class LoadedStateProbe:
    """Counts loads with ``strict=False`` of which not one name was found in the module that was given them.

    A checkpoint of a wrapped model (``module.``, ``model.``, ``_orig_mod.``) is the usual case. Loads of which a part
    fits are a way to begin with another model's body, and are not counted; nor are modules that are not trained.
    """

    name = "loaded-state"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END,)
    provides: tuple[Metric, ...] = (
        Metric("state.unmatched", "State dicts loaded since the last step of which not one name fitted."),
    )

    def __init__(self) -> None:
        self._told = False

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        found = [text for module, text in event.unmatched_loads if _is_part(module(), event)]
        if self._told and not found:
            return ()
        self._told = True
        return (Sample("state.unmatched", event.step, float(len(found)), detail=lambda: {"which": first_few(found)}),)


def _is_part(module: Any, event: Event) -> bool:
    return module is not None and event.model is not None and any(m is module for _, m in event.model.named_modules())
