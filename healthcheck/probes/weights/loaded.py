"""State dicts that were loaded into the model and changed nothing: they fitted nowhere, or are the model's own tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.names import first_few
from healthcheck.protocols import Demand
from healthcheck.samples import Metric, Sample


class LoadedStateProbe:
    """Counts loads that changed nothing, in modules that are trained.

    *Unmatched*: with ``strict=False``, and not one name was found in the module that was given them. A checkpoint of
    a wrapped model (``module.``, ``model.``, ``_orig_mod.``) is the usual case. Loads of which a part fits are a way to
    begin with another model's body, and are not counted.

    *Own*: during the training, from tensors that are the module's own. ``best = model.state_dict()`` is no copy.
    """

    name = "loaded-state"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END, EventKind.TRAIN_END)
    provides: tuple[Metric, ...] = (
        Metric("state.unmatched", "State dicts loaded since the last step of which not one name fitted."),
        Metric(
            "state.own", "State dicts loaded since the last step that were the module's own tensors, no copies of them."
        ),
    )

    def __init__(self) -> None:
        self._told: set[str] = set()

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        unmatched = [text for module, text in event.unmatched_loads if _is_part(module(), event)]
        own: Sequence[str] = ()
        if event.run is not None and event.run.own_loads:
            own = tuple(event.run.own_loads)
            event.run.own_loads.clear()
        return [*self._samples("state.unmatched", unmatched, event), *self._samples("state.own", own, event)]

    def _samples(self, metric: str, found: Sequence[str], event: Event) -> Iterable[Sample]:
        # A run that ends without a step has trained nothing of which it could be said that all was in order.
        if not found and (metric in self._told or event.kind is EventKind.TRAIN_END):
            return ()
        self._told.add(metric)
        return (Sample(metric, event.step, float(len(found)), detail=lambda: {"which": first_few(found)}),)


def _is_part(module: Any, event: Event) -> bool:
    return module is not None and event.model is not None and any(m is module for _, m in event.model.named_modules())
