"""``locate``: a training that goes on as if nobody had looked, and models of all kinds."""

from __future__ import annotations

import copy
import csv
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from locating import Apply, Net, rules, told, train
from torch import nn
from torch.nn import functional as F

import healthcheck

# --------------------------------------------------------------------------- nothing changes


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_the_training_goes_on_bit_for_bit_as_without_it(fault: str) -> None:
    """Batch norm statistics, dropout masks, gradients, modes, Python attributes and two generators."""
    function = {"forward": lambda x: torch.log(F.relu(x)), "backward": lambda x: (x * (x > 0)).square().sqrt()}[fault]
    ends = []
    torch.manual_seed(0)
    first = Net(function)
    for then in (("locate", "skip_update"), ("skip_update",)):
        random.seed(3)
        model = copy.deepcopy(first)
        model.drop.eval()
        health = train(model, *then, steps=4)
        drawn = (torch.rand(1).item(), random.random())
        gradients = [p.grad for p in model.parameters()]
        ends.append((state(model), gradients, drawn, model.forwards, model.drop.training, model.training))
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        assert sum(hooks) == 0
        assert len(torch.nn.modules.module._global_forward_pre_hooks) == 0
        assert health.alerts
    assert "first non-finite" in told(health) if "locate" in then else True
    assert all(torch.equal(ends[0][0][k].nan_to_num(7), ends[1][0][k].nan_to_num(7)) for k in ends[0][0])
    for a, b in zip(ends[0][1], ends[1][1], strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    assert ends[0][2:] == ends[1][2:]


def test_numpy_draws_the_same_after_a_replay_as_without_one() -> None:
    numpy = pytest.importorskip("numpy")
    drawn = []
    for then in (("locate", "skip_update"), ("skip_update",)):
        torch.manual_seed(0)
        numpy.random.seed(3)
        train(Net(lambda x: torch.log(F.relu(x)) + float(numpy.random.rand())), *then, steps=4)
        drawn.append(float(numpy.random.rand()))
    assert drawn[0] == drawn[1]


def test_the_replay_draws_the_same_dropout_masks() -> None:
    """One mask in eight leaves ten values: a replay with other numbers would find nothing."""
    torch.manual_seed(5)
    model = nn.Sequential(
        nn.Linear(4, 64),
        nn.Dropout(0.98),
        Apply(lambda x: x * torch.where((x != 0).sum() == 10, float("nan"), 1.0)),
        nn.Linear(64, 1),
    )
    text = told(train(model, steps=60))
    assert text.startswith("first non-finite output: `2` (Apply)")


def test_without_a_rule_that_asks_nothing_listens() -> None:
    model = Net()
    train(model, "skip_update", steps=1)
    health = healthcheck.watch(
        model, torch.optim.SGD(model.parameters(), 0.1), rules=rules("warn"), console=False, record=False
    )
    assert len(torch.nn.modules.module._global_forward_pre_hooks) == 0
    health.close()


# --------------------------------------------------------------------------- models of all kinds


def test_a_compiled_model_is_replayed_as_its_original_and_not_compiled_again() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Apply(torch.log), nn.Linear(8, 1))
    health = train(torch.compile(model, backend="eager"), "locate", "skip_update")
    assert told(health).startswith("first non-finite output: `2` (Apply)")
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def test_a_model_compiled_in_place_is_seen_and_put_back() -> None:
    from torch._dynamo.utils import counters

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.log, self.head = nn.Linear(4, 8), Apply(lambda x: x.relu().log()), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.log(self.fc(x)))  # type: ignore[no-any-return]

    torch._dynamo.reset()
    counters.clear()
    model = Plain()
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    health = train(model, "locate", "skip_update")
    assert health.alerts[0].fired_step == 1
    assert told(health).startswith("first non-finite output: `log` (Apply)")
    assert counters["stats"]["unique_graphs"] == 1
    assert model._compiled_call_impl is compiled


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as rank 0 of two; the other does not exist, so that speaking to it would show."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setenv("HEALTHCHECK_AGREE", "off")
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()


def test_under_ddp_the_module_inside_is_replayed() -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        model = nn.parallel.DistributedDataParallel(Net(lambda x: torch.log(F.relu(x))))
        assert told(train(model)).startswith("first non-finite output: `middle` (Apply)")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_a_forward_pass_that_speaks_to_other_ranks_is_not_replayed() -> None:
    def summed(x: torch.Tensor) -> torch.Tensor:
        both = x.detach().clone()
        torch.distributed.all_reduce(both)
        return x + both * float("nan")

    text = told(train(Net(summed)))
    assert text.startswith("step 1 cannot be replayed: its forward pass communicates with other ranks (c10d.allreduce_")


def test_activation_checkpointing_is_looked_into() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.head = (
                nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), Apply(lambda x: (x * x).sqrt())),
                nn.Linear(8, 1),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(checkpoint(self.inside, x, use_reentrant=False))  # type: ignore[no-any-return]

    assert "sqrt in `inside.2` (Apply)" in told(
        train(Checkpointed(), data=lambda step: torch.randn(8, 4, requires_grad=True))
    )


def test_of_several_micro_batches_the_bad_one_is_found() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    health = healthcheck.watch(model, optimizer, rules=rules("locate", "skip_update"), console=False, record=False)
    for step in (1, 2):
        optimizer.zero_grad()
        for part in range(3):
            x = torch.randn(8, 4)
            if (step, part) == (2, 1):
                x[:] = float("inf")
            model(x).mean().backward()
        optimizer.step()
        health.step()
    health.close()
    assert health.alerts[0].fired_step == 2
    assert told(health).startswith("the input itself is not finite")


def test_two_networks_are_told_apart_by_their_names() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.judge = nn.Linear(4, 4), nn.Sequential(Apply(lambda x: x / 0), nn.Linear(4, 1))

    text = told(train(Pair(), forward=lambda pair, x: pair.judge(pair.maker(x))))
    assert text.startswith("first non-finite output: `judge.0` (Apply)")


def test_the_table_holds_every_module_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEALTHCHECK_RUNS", str(tmp_path))
    torch.manual_seed(0)
    model = Net(lambda x: torch.log(F.relu(x)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with healthcheck.watch(model, optimizer, rules=rules("locate"), console=False) as health:
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        health.step()
    (outcome,) = (o for o in health.alerts[0].actions if o.action == "locate")
    rows = list(csv.DictReader(Path(outcome.data["path"]).read_text().splitlines()))
    outputs = {row["module"]: int(row["nonfinite"]) for row in rows if row["what"] == "output"}
    assert outputs["drop"] == 0 < outputs["middle"]
    assert {row["class"] for row in rows} == {"Net", "Linear", "BatchNorm1d", "Dropout", "Apply"}
