"""State dicts that fitted nowhere, told once, and only of the model that is trained."""

from __future__ import annotations

import weakref

from driver import View, Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.core.runinfo import StateLoads
from healthcheck.probes.optimizers import LoadedStateProbe


def test_only_loads_into_the_trained_model_count() -> None:
    model, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    watched = Watched([LoadedStateProbe()])
    view = View(model)
    watched.emit(EventKind.STEP_END, 1, model=view, loads=StateLoads())
    watched.emit(EventKind.STEP_END, 2, model=view, loads=StateLoads([(weakref.ref(other), "an average")]))
    found = StateLoads([(weakref.ref(model[0]), "2 names like a.weight")])
    watched.emit(EventKind.STEP_END, 3, model=view, loads=found)
    watched.emit(EventKind.STEP_END, 4, model=view)
    assert watched.of("state.unmatched") == [(1, 0.0), (3, 1.0)]
    assert watched.facts("state.unmatched")["which"] == "2 names like a.weight"


def test_a_load_of_the_models_own_tensors_is_told_at_the_end_of_the_run_too() -> None:
    watched = Watched([LoadedStateProbe()])
    loads = watched.run.loads
    watched.emit(EventKind.STEP_END, 1, model=View(nn.Linear(2, 2)), loads=loads)
    loads.own.append("Linear, 2 tensors")
    watched.emit(EventKind.TRAIN_END, 1, loads=loads)
    assert watched.values("state.own") == [0.0, 1.0]
    assert watched.facts("state.own")["which"] == "Linear, 2 tensors"
    assert watched.values("state.unmatched") == [0.0]
