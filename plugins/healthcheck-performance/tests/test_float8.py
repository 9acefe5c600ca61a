"""Float8 through torchao, emulated on the processor: what is converted, what its health says, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from healthcheck import UsageError
from healthcheck.testing import play
from healthcheck_performance import Float8
from healthcheck_performance.float8 import AMAX, SATURATED, SCALE, UNDERFLOW, measure

PACK = "healthcheck_performance:performance"
torchao = pytest.mark.skipif(
    __import__("importlib.util").util.find_spec("torchao") is None,
    reason="torchao is not installed (make performance)",
)
# torchao warns about its own compiled extensions, and torch about torchao.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class Gpt(nn.Module):
    """Linear layers of which one has sizes that do not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(32, 5)
        self.outlier = 1.0

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        spike = torch.zeros_like(x)
        spike[0, 0] = self.outlier - 1.0
        return self.head(x) + self.blocks[1](x + spike)[:, :5].detach() * 0  # measured, and of no effect


def config(dtype: Any = torch.float8_e4m3fn, granularity: str = "TENSORWISE") -> Any:
    return SimpleNamespace(target_dtype=dtype, scaling_granularity=SimpleNamespace(name=granularity))


def test_an_outlier_sets_the_scale_and_makes_the_others_zero() -> None:
    value = torch.full((4, 64), 1e-3)
    plain = measure(value, config())
    assert float(plain[AMAX]) == pytest.approx(1e-3)
    assert float(plain[UNDERFLOW]) == 0
    value[0, 0] = 1e4
    spoilt = measure(value, config())
    assert float(spoilt[AMAX]) == 1e4
    assert float(spoilt[SCALE]) == pytest.approx(448 / 1e4)
    assert float(spoilt[UNDERFLOW]) > 0.99
    by_row = measure(value, config(granularity="AXISWISE"))
    assert float(by_row[UNDERFLOW]) < 0.26  # only the row of the outlier


def test_zeros_are_not_lost_and_what_cannot_be_scaled_is_cut_off() -> None:
    assert float(measure(torch.zeros(8), config())[UNDERFLOW]) == 0
    assert float(measure(torch.tensor([1.0, -1.0]), config())[SATURATED]) == 0
    assert not bool(torch.isfinite(measure(torch.tensor([1.0, torch.inf]), config())[AMAX]))


@torchao
def test_layers_that_fit_are_converted_and_parameters_stay_the_same_objects() -> None:
    model = Gpt()
    before = dict(model.named_parameters())
    tool = Float8(emulate=True)
    tool.convert(model)
    assert tool.converted == ["blocks.0.0", "blocks.1.0"]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    other = Gpt()
    Float8(emulate=True, exclude=["blocks.0.*"]).convert(other)
    assert type(other.blocks[0][0]) is nn.Linear
    assert type(other.blocks[1][0]).__name__ == "Float8Linear"


@torchao
def test_without_hardware_it_is_an_error_before_training_that_says_what_to_do(train: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=r"capability 8\.9 or later.*emulate: true"):
        Float8().convert(Gpt())
    rules = {"version": 1, "settings": {"performance.float8": {}}, "rules": {}}
    with pytest.raises(UsageError, match="no float8 arithmetic"):
        train(rules, model=Gpt(), width=32)


@torchao
def test_nothing_that_fits_is_an_error_as_well() -> None:
    with pytest.raises(UsageError, match=r"no linear layer of Gpt among mlp\.\* can be converted"):
        Float8(emulate=True, modules=["mlp.*"]).convert(Gpt())


@torchao
@pytest.mark.slow
def test_from_a_rule_file_it_trains_and_its_health_moves_when_an_outlier_is_planted(train: Callable[..., Any]) -> None:
    rules = {"version": 1, "extends": [PACK], "settings": {"performance.float8": {"emulate": True}}}

    def plant(step: int, session: Any) -> None:
        planted.outlier = 1e5 if step >= 75 else 1.0

    healthy = train(rules, model=Gpt(), width=32, steps=100)
    assert healthy.report["alerts"] == []
    assert healthy.report["performance"]["findings"]["performance.float8"]["text"].startswith("2 linear layers")
    planted = Gpt()
    ran = train(rules, model=planted, width=32, steps=100, between=plant)
    series = "performance.float8_amax[module=blocks.1.0,tensor=input]"
    values = dict(ran.session.history(series))
    assert set(values) == {*range(10, 101, 10)}
    assert values[80] > 1e4 > 100 > values[70]
    assert "float8-outlier" in {alert["rule"] for alert in ran.report["alerts"]}
    assert "float8-underflow" in {alert["rule"] for alert in ran.report["alerts"]}


def test_values_lost_are_judged_in_inputs_and_not_in_gradients_whose_tail_is_always_next_to_zero() -> None:
    series = "performance.float8_underflow[module=up,tensor={}]"
    rules = {"version": 1, "extends": [PACK]}
    for tensor, fired in (("input", ["float8-underflow"]), ("grad_output", [])):
        played = play(rules, {series.format(tensor): [0.3] * 40}, plugins=["healthcheck_performance"])
        assert [alert.rule for alert in played.alerts] == fired
