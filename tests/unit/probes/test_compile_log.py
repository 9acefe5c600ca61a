"""What was compiled: graph breaks with place and advice, recompilations with their guard, compile time by function."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import healthcheck
from healthcheck.testing import FakeModel

HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(i for i, line in enumerate(lines, start=1) if line.strip().startswith(text))


class Gate(nn.Module):
    def forward(self, x: Any) -> Any:
        if x.sum() > 0:
            x = x * 2
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Any) -> Any:
        y = self.gate(x)
        print("half way")
        return y * 3


class Whole(nn.Module):
    """The advice for both lines of the other two, followed."""

    def forward(self, x: Any) -> Any:
        return torch.where(x.sum() > 0, x * 2, x) * 3


class View(FakeModel):
    def __init__(self, module: Any) -> None:
        super().__init__(dict(module.named_parameters()))
        self.module = module

    def named_modules(self) -> Any:
        return list(self.module.named_modules())


def test_each_graph_break_has_its_line_its_module_and_what_to_change(capsys: Any) -> None:
    before, net = healthcheck.compile_log(), Net()
    compiled = torch.compile(net, backend="eager")
    compiled(torch.ones(3))
    compiled(torch.ones(3))
    branch, call = healthcheck.compile_log(before).graph_breaks
    assert branch.place(View(net)) == f"{HERE}:{line_of('if x.sum() > 0:')} in forward (module gate, a Gate)"
    assert call.place(View(net)) == f"{HERE}:{line_of('print(')} in forward (the model, a Net)"
    assert "torch.where" in branch.advice
    assert "print" in call.advice
    assert "TORCH_LOGS" not in branch.advice + branch.reason + call.advice + call.reason


def test_the_advice_mends_what_it_was_given_for() -> None:
    before = healthcheck.compile_log()
    compiled = torch.compile(Whole(), backend="eager", fullgraph=True)
    for x in (torch.ones(3), -torch.ones(3)):
        assert torch.equal(compiled(x), x * 6 if x.sum() > 0 else x * 3)
    log = healthcheck.compile_log(before)
    assert (log.graph_breaks, log.recompiles) == ((), ())
    assert [function.function for function in log.functions] == ["forward"]


def test_a_recompilation_says_which_size_changed_and_padding_ends_it() -> None:
    def scaled(batch: Any) -> Any:
        return batch * 2

    before = healthcheck.compile_log()
    compiled = torch.compile(scaled, backend="eager", dynamic=False)
    for size in (4, 6, 4):
        compiled(torch.ones(size))
    [again] = healthcheck.compile_log(before).recompiles
    assert (again.function, again.file) == ("scaled", __file__)
    assert "size mismatch at index 0. expected 4, actual 6" in again.guard
    assert "dimension 0 of `batch`" in again.advice

    torch._dynamo.reset()  # or the same code, compiled in another way, would be a recompilation, too
    before = healthcheck.compile_log()
    padded = torch.compile(scaled, backend="eager", dynamic=True)
    for size in (4, 6, 9):
        padded(torch.ones(size))
    assert healthcheck.compile_log(before).recompiles == ()


def test_a_python_number_that_changes_is_named_as_such() -> None:
    def step(x: Any, count: int) -> Any:
        return x * count

    before = healthcheck.compile_log()
    compiled = torch.compile(step, backend="eager", dynamic=False)
    for count in (2, 3):
        compiled(torch.ones(2), count)
    [again] = healthcheck.compile_log(before).recompiles
    assert again.guard == "count == 2 (in `return x * count`)"
    assert "pass it as a tensor" in again.advice


def test_compile_time_is_that_of_the_function_with_all_behind_its_breaks(capsys: Any) -> None:
    before = healthcheck.compile_log()
    torch.compile(Net(), backend="eager")(torch.ones(3))
    log = healthcheck.compile_log(before)
    names = {function.function for function in log.functions}
    assert names == {"forward"}
    assert sum(function.compilations for function in log.functions) >= 3  # before, between and after the breaks
    assert 0 < log.seconds == pytest.approx(sum(function.seconds for function in log.functions))


def test_what_an_earlier_log_knew_is_left_out(capsys: Any) -> None:
    torch.compile(Net(), backend="eager")(torch.ones(3))
    log = healthcheck.compile_log(healthcheck.compile_log())
    assert (log.graph_breaks, log.recompiles, log.functions) == ((), (), ())
