"""State dicts that fitted nowhere, told once, and only of the model that is trained."""

from __future__ import annotations

import weakref

from driver import View, Watched
from torch import nn

from healthcheck.events import EventKind
from healthcheck.probes.loaded import LoadedStateProbe


def test_only_loads_into_the_trained_model_count() -> None:
    model, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    watched = Watched([LoadedStateProbe()])
    view = View(model)
    watched.emit(EventKind.STEP_END, 1, model=view)
    watched.emit(EventKind.STEP_END, 2, model=view, unmatched_loads=[(weakref.ref(other), "an average")])
    watched.emit(EventKind.STEP_END, 3, model=view, unmatched_loads=[(weakref.ref(model[0]), "2 names like a.weight")])
    watched.emit(EventKind.STEP_END, 4, model=view)
    assert watched.of("state.unmatched") == [(1, 0.0), (3, 1.0)]
    assert watched.facts("state.unmatched")["which"] == "2 names like a.weight"
