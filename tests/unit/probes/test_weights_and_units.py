"""Weights that are not finite, ties that are lost, units that are dead, compilations."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from driver import Everything, Loop, View, Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.probes.activations import BATCHES, DeadUnitProbe
from healthcheck.probes.compilation import CompilationProbe
from healthcheck.probes.weights import TIES_EVERY, TiedWeightProbe, WeightProbe


def test_bad_weights_are_counted_when_due_and_at_every_checkpoint() -> None:
    model = nn.Linear(4, 2)
    watched = Watched([WeightProbe()], Everything(every=500))
    watched.emit(EventKind.STEP_END, 1, model=View(model))
    assert watched.samples == []
    watched.emit(EventKind.CHECKPOINT_SAVED, 1, model=View(model))
    with torch.no_grad():
        model.weight[1, 2] = math.nan
    watched.emit(EventKind.STEP_END, 500, model=View(model))
    assert watched.values("params.nonfinite") == [0.0, 1.0]
    assert watched.facts("params.nonfinite")["weights"] == "1 of 2 tensors not finite, first weight, 1 of 8 values"


def test_huge_finite_weights_are_finite() -> None:
    model = nn.Linear(4, 2)
    nn.init.constant_(model.weight, 1e30)
    watched = Watched([WeightProbe()])
    watched.emit(EventKind.STEP_END, 1, model=View(model))
    assert watched.last("params.nonfinite") == 0


class Tied(nn.Module):
    def __init__(self, *, promise: bool = False) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.config = SimpleNamespace(tie_word_embeddings=promise)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def steps(watched: Watched, model: nn.Module, first: int, last: int) -> None:
    view = View(model)
    for step in range(first, last + 1):
        watched.emit(EventKind.STEP_END, step, model=view)


def test_a_tie_lost_half_way_is_noticed() -> None:
    model, watched = Tied(), Watched([TiedWeightProbe()])
    steps(watched, model, 1, 10)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    steps(watched, model, 11, TIES_EVERY)
    assert watched.of("params.tied_lost") == [(1, 0.0), (TIES_EVERY, 1.0)]
    assert watched.facts("params.tied_lost") == {"which": "embed.weight and head.weight"}


def test_a_tie_that_the_config_promises_and_nobody_made() -> None:
    model, watched = Tied(promise=True), Watched([TiedWeightProbe()])
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    steps(watched, model, 1, 1)
    assert watched.last("params.tied_lost") == 1


@pytest.mark.parametrize("model", [Tied(), Tied(promise=True), nn.Linear(2, 2)], ids=["tied", "as promised", "plain"])
def test_ties_that_hold_are_silent(model: nn.Module) -> None:
    watched = Watched([TiedWeightProbe()])
    steps(watched, model, 1, 2 * TIES_EVERY)
    assert set(watched.values("params.tied_lost")) == {0.0}


def relus(model: nn.Module, steps: int = 2 * BATCHES) -> Watched:
    watched = Watched([DeadUnitProbe()])
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.0))
    loop.run(steps, lambda: model(torch.randn(8, 4)).pow(2).mean())
    return watched


def test_a_layer_that_outputs_only_zeros_is_dead() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))
    nn.init.constant_(model[2].bias, -1000.0)
    watched = relus(model)
    assert watched.last("units.dead") == 1
    assert watched.facts("units.dead") == {"which": "3, 100% of its units"}
    assert watched.last("units.dead[module=1]") < 1


def test_units_that_fire_now_and_then_are_alive() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    assert relus(model).last("units.dead") == 0


def test_channels_are_the_units_of_a_convolution() -> None:
    model = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))
    nn.init.constant_(model[1].bias, 1.0)
    nn.init.constant_(model[1].weight, 0.0)
    with torch.no_grad():
        model[1].bias[0] = -1.0
    assert relus(model).last("units.dead") == 0.25


def test_hooks_are_there_only_if_wanted_and_go_at_the_end() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
    unwanted = Watched([DeadUnitProbe()], Everything({"loss"}))
    unwanted.emit(EventKind.STEP_START, 1, model=View(model))
    assert not model[1]._forward_hooks
    wanted = Watched([DeadUnitProbe()])
    wanted.emit(EventKind.STEP_START, 1, model=View(model))
    assert len(model[1]._forward_hooks) == 1
    wanted.close()
    assert not model[1]._forward_hooks


def test_what_was_compiled_in_the_process_before_the_run_is_not_of_the_run() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 3

    torch.compile(broken, backend="eager")(torch.ones(2))
    watched = Watched([CompilationProbe()])
    watched.emit(EventKind.STEP_END, 10)
    assert watched.of("compile.graph_breaks") == []

    torch.compile(lambda x: x + 5, backend="eager")(torch.ones(2))
    watched.emit(EventKind.STEP_END, 20)
    assert watched.last("compile.graph_breaks") == 0


def test_recompiles_and_graph_breaks_are_those_that_dynamo_counts() -> None:
    convert = pytest.importorskip("torch._dynamo.convert_frame")
    torch._dynamo.reset()
    sys.modules["torch._dynamo.utils"].counters.clear()

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    watched = Watched([CompilationProbe()])
    watched.emit(EventKind.STEP_END, 1)
    compiled = torch.compile(broken, backend="eager", dynamic=False)
    compiled(torch.ones(3))
    watched.emit(EventKind.STEP_END, 2)
    compiled(torch.ones(4))
    watched.emit(EventKind.STEP_END, 3)
    compiled(torch.ones(4))
    watched.emit(EventKind.STEP_END, 4)
    assert convert.FRAME_COMPILE_COUNTER
    first, second, third = (dict(watched.of("compile.recompiles"))[n] for n in (2, 3, 4))
    assert first == 0
    assert second > 0
    assert third == second
    assert watched.last("compile.graph_breaks") >= 1
    torch._dynamo.reset()


def test_a_function_that_dynamo_gave_up_on_is_counted() -> None:
    pytest.importorskip("torch._dynamo.convert_frame")
    torch._dynamo.reset()
    sys.modules["torch._dynamo.utils"].counters.clear()
    watched = Watched([CompilationProbe()])
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    limit = torch._dynamo.config.recompile_limit
    for n in range(1, limit + 3):
        compiled(torch.ones(n + 1))
        watched.emit(EventKind.STEP_END, n)
    assert dict(watched.of("compile.limit_hits"))[limit] == 0
    assert watched.last("compile.limit_hits") == 1
    torch._dynamo.reset()
