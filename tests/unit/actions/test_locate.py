"""``locate``: real faults in real models, and a training that goes on as if nobody had looked."""

from __future__ import annotations

import copy
import csv
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import healthcheck

WHEN_BAD = {"metric": "grad_norm", "when": "nonfinite", "severity": "error"}


def rules(*then: Any) -> dict[str, Any]:
    return {"version": 1, "rules": {"bad": {**WHEN_BAD, "then": ["warn", *then]}}}


class Apply(nn.Module):
    """A function as a module with a name."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Net(nn.Module):
    """Batch norm and dropout, so that a replay has state to spoil and random numbers to repeat."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.middle, self.head = Apply(function), nn.Linear(8, 1)
        self.forwards = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        y: torch.Tensor = self.head(self.middle(self.drop(self.norm(self.fc(x)))))
        return y


def train(
    model: Any,
    *then: Any,
    steps: int = 3,
    data: Callable[[int], torch.Tensor] = lambda step: torch.randn(8, 4),
    loss_of: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.pow(2).mean(),
    forward: Callable[[Any, torch.Tensor], torch.Tensor] = lambda model, x: model(x),
    given: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A loop of one's own under watch; returns it closed."""
    torch.manual_seed(1)
    named = dict(model.named_modules()).get("_orig_mod", model)
    optimizer = torch.optim.SGD(named.parameters(), 0.01, momentum=0.9)
    health = healthcheck.watch(
        model, optimizer, rules=given or rules(*(then or ("locate",))), console=False, record=False, **options
    )
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = loss_of(forward(model, data(step)))
        loss.backward()
        optimizer.step()
        health.step(loss=loss)
    health.close()
    assert not health.session.internal_errors
    return health


def told(health: Any) -> str:
    """What ``locate`` said of the first alert."""
    (outcome,) = (o for o in health.alerts[0].actions if o.action == "locate")
    return str(outcome.text)


# --------------------------------------------------------------------------- forward


def test_log_of_zero_names_the_submodule_its_inputs_and_the_module_before() -> None:
    text = told(train(Net(lambda x: torch.log(F.relu(x)))))
    assert text.startswith("first non-finite output: `middle` (Apply), ")
    assert "of 64 values infinite in float32; inputs finite, max " in text
    assert "; before it `drop` (Dropout) gave max " in text


def test_a_bad_operation_between_two_modules_is_placed_in_the_code_of_the_module_around() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second((self.first(x) - 100).sqrt())  # type: ignore[no-any-return]

    text = told(train(nn.Sequential(nn.Identity(), Around())))
    assert text.startswith(
        "first non-finite output: in the code of `1` (Around) before `1.second` (Linear), whose input"
    )
    assert "before it `1.first` (Linear) gave max" in text


def test_a_mask_of_minus_infinity_that_a_softmax_takes_in_is_not_the_culprit() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = Apply(lambda x: x.masked_fill(torch.eye(8, dtype=torch.bool), float("-inf")))
            self.softmax, self.broken, self.out = nn.Softmax(-1), Apply(lambda x: x / (x - x)), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = x @ x.T
            return self.out(self.broken(self.softmax(self.mask(scores))))  # type: ignore[no-any-return]

    assert "`broken` (Apply)" in told(train(Masked()))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 1e5), (torch.bfloat16, 1e38)])
def test_an_overflow_under_autocast_is_found_in_the_type_in_which_it_happened(dtype: torch.dtype, scale: float) -> None:
    model = Net(lambda x: x * scale)
    with torch.no_grad():
        model.head.weight.fill_(100.0)

    def forward(model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(x)  # type: ignore[no-any-return]

    text = told(train(model, forward=forward))
    assert f"in {str(dtype).removeprefix('torch.')}" in text.split(";")[0]
    assert "first non-finite output: " in text


def test_a_batch_that_holds_nan_is_blamed_itself() -> None:
    def data(step: int) -> torch.Tensor:
        batch = torch.randn(8, 4)
        batch[0, 0] = float("nan") if step == 2 else 0.0
        return batch

    text = told(train(Net(), data=data))
    assert text == "the input itself is not finite: argument 1 of the model (Net) has 1 of 32 values NaN in float32"


def test_a_named_argument_of_a_batch_is_named() -> None:
    bad = torch.full((8, 4), float("inf"))
    text = told(train(Net(), data=lambda step: bad, forward=lambda model, x: model(x=x)))
    assert text.startswith("the input itself is not finite: argument `x` of the model (Net)")


# --------------------------------------------------------------------------- backward, loss, weights


def test_a_gradient_that_is_bad_where_the_forward_was_not_names_operation_and_module() -> None:
    text = told(train(Net(lambda x: (x * x).sqrt())))
    assert text.startswith("forward finite; first non-finite gradient: in the backward of ")
    assert "in the backward of sqrt in `middle` (Apply), " in text
    assert "the gradient that reached it is finite, max " in text


def test_a_fault_in_the_loss_after_the_model_is_told_from_one_in_the_model() -> None:
    text = told(train(Net(), loss_of=lambda y: (y - y).sqrt().sum()))
    assert text.startswith("the model is finite; the gradient that came back to its output is not (8 of 8 values")
    assert text.endswith("the fault is after the model, where the loss is computed")


def test_weights_that_were_not_finite_before_are_named_instead_of_a_module() -> None:
    model = Net()
    with torch.no_grad():
        model.head.weight[0, :2] = float("nan")
    text = told(train(model))
    assert text.startswith("the weights were not finite before step 1 (`head.weight`, 2 of 8 values)")


def test_after_the_update_the_weights_show_only_that_it_is_past() -> None:
    """A loop tells its loss when the update is made."""
    given = {"version": 1, "rules": {"bad": {"metric": "loss", "when": "nonfinite", "then": ["warn", "locate"]}}}
    text = told(train(Net(torch.log), given=given))
    assert text.startswith("the update of step 1 is past and has written it into the weights (`fc.weight`, 32 of 32")


def test_a_fault_that_does_not_come_again_is_said_to_be_finite() -> None:
    spoiled = [False]

    def once(x: torch.Tensor) -> torch.Tensor:
        if not spoiled[0]:
            spoiled[0] = True
            return x * float("nan")
        return x

    text = told(train(Net(once)))
    assert text.startswith("the replay of step 1 is finite, while the output of the model was not in the step")


def test_gradients_of_a_large_output_are_not_kept_beyond_the_limit() -> None:
    text = told(train(Net(lambda x: (x * x).sqrt()), {"locate": {"keep_mib": 0}}))
    assert "backward not replayed: the gradients of its output take 0 MiB and were not kept (option keep_mib)" in text


# --------------------------------------------------------------------------- nothing changes


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_the_training_goes_on_bit_for_bit_as_without_it(fault: str) -> None:
    """Batch norm statistics, dropout masks, gradients, modes, Python attributes and three generators."""
    function = {"forward": lambda x: torch.log(F.relu(x)), "backward": lambda x: (x * (x > 0)).square().sqrt()}[fault]
    ends = []
    torch.manual_seed(0)
    first = Net(function)
    for then in (("locate", "skip_update"), ("skip_update",)):
        random.seed(3)
        numpy.random.seed(3)
        model = copy.deepcopy(first)
        model.drop.eval()
        health = train(model, *then, steps=4)
        drawn = (torch.rand(1).item(), random.random(), float(numpy.random.rand()))
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
    assert text.startswith("step 1 cannot be replayed: its forward pass speaks to other ranks (c10d.allreduce_")


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
