"""What an evaluation is made with: its rows, its inputs, its dropout; and settings that nobody reads."""

from __future__ import annotations

import pytest
import torch
from driver import View, Watched
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from healthcheck.core.events import EventKind
from healthcheck.instrument.data import shared_rows
from healthcheck.instrument.evaluation_dropout import EvaluationDropout
from healthcheck.probes.modes import TrainModeLossProbe
from healthcheck.probes.settings import IgnoredSettingProbe, UnusualSettingProbe

ROWS = torch.arange(40.0).view(20, 2)
WHOLE = TensorDataset(ROWS)


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.drop, self.kind = nn.Linear(4, 8), nn.Dropout(0.3), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.layer(x))
        if self.kind == "function":
            return F.dropout(x, 0.5)
        if self.kind == "asks":
            return F.dropout(x, 0.5, training=self.training)
        if self.kind == "mask by hand":
            return x * torch.empty_like(x).bernoulli_(0.8) / 0.8
        if self.kind == "attention":
            return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.2)[0]
        if self.kind == "draws":
            return x + torch.randn_like(x)  # as a variational autoencoder does
        return x


def dropped(
    kind: str, context: object = torch.no_grad, *, train: bool = False, layer_in_train: bool = False
) -> list[str] | None:
    net = Net(kind).train(train)
    net.drop.train(layer_in_train or train)
    looks = EvaluationDropout(wanted=lambda: True, is_trained=lambda module: True)
    looks.pause_begins()
    with context():  # type: ignore[operator]
        net(torch.randn(6, 4))
    return looks.pause_ends()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("kind", ["function", "mask by hand", "attention"])
def test_dropout_as_a_function_in_evaluation_mode_is_found(kind: str, context: object) -> None:
    assert len(dropped(kind, context) or ()) == 1


@pytest.mark.parametrize("kind", ["asks", "draws", "plain"])
def test_other_random_numbers_and_dropout_that_asks_are_not(kind: str) -> None:
    assert dropped(kind) == []


def test_a_dropout_layer_that_was_switched_on_by_itself_is_left_alone() -> None:
    assert dropped("plain", layer_in_train=True) == []


def test_a_model_in_train_mode_is_not_looked_into() -> None:
    assert dropped("function", train=True) is None


def test_the_pass_that_is_looked_into_gives_what_it_gives_without() -> None:
    net, x = Net("function").eval(), torch.randn(6, 4)
    torch.manual_seed(1)
    with torch.no_grad():
        plain = net(x)
    looks = EvaluationDropout(wanted=lambda: True, is_trained=lambda module: True)
    looks.pause_begins()
    torch.manual_seed(1)
    with torch.no_grad():
        watched = net(x)
    looks.pause_ends()
    assert torch.equal(plain, watched)


def test_a_pass_that_fails_leaves_no_mode_behind() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    looks = EvaluationDropout(wanted=lambda: True, is_trained=lambda module: True)
    looks.pause_begins()
    with pytest.raises(RuntimeError), torch.no_grad():
        Net("plain").eval()(torch.randn(6, 5))
    looks.pause_ends()
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize(
    ("evaluated", "trained", "part"),
    [
        (WHOLE, WHOLE, 1.0),
        (Subset(WHOLE, range(5)), WHOLE, 1.0),
        (WHOLE, Subset(WHOLE, range(5)), 0.25),
        (Subset(WHOLE, range(10, 20)), Subset(WHOLE, range(10)), 0.0),
        (Subset(WHOLE, range(5, 15)), Subset(WHOLE, range(10)), 0.5),
        (Subset(Subset(WHOLE, range(10)), range(4)), Subset(WHOLE, range(2)), 0.5),
        (TensorDataset(ROWS[12:]), TensorDataset(ROWS[:12]), 0.0),
        (TensorDataset(ROWS), TensorDataset(ROWS[:5]), 0.25),
        (TensorDataset(ROWS.clone()), WHOLE, 0.0),
        ([1, 2], WHOLE, 0.0),
    ],
)
def test_rows_that_two_data_sets_share(evaluated: object, trained: object, part: float) -> None:
    assert shared_rows(evaluated, trained) == part


def settings(model: nn.Module, optimizer: torch.optim.Optimizer, probe: object) -> dict[str, float]:
    watched = Watched([probe])
    for step in (3, 20, 40):
        watched.emit(EventKind.BEFORE_UPDATE, step, model=View(model, [optimizer]), optimizer=optimizer)
    return {sample.metric: sample.value for sample in watched.samples}


def test_attributes_that_nobody_reads_are_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert settings(model, optimizer, IgnoredSettingProbe()) == {"settings.ignored": 0.0}
    optimizer.lr = 0.01  # type: ignore[attr-defined]
    model[0].requires_grad = False  # type: ignore[assignment]
    model[1].weight.require_grad = False
    assert settings(model, optimizer, IgnoredSettingProbe()) == {"settings.ignored": 3.0}


def test_what_is_set_as_it_should_be_is_not() -> None:
    class Own(torch.optim.SGD):
        """An optimizer of one's own may read what it likes."""

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = Own(model.parameters(), lr=0.1)
    optimizer.lr = 0.01  # type: ignore[attr-defined]
    optimizer.param_groups[0]["lr"] = 0.05
    assert settings(model, optimizer, IgnoredSettingProbe()) == {"settings.ignored": 0.0}


def test_settings_of_another_library_are_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.99), nn.Dropout(0.9), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.999, 0.9))
    found = settings(model, optimizer, UnusualSettingProbe())
    assert found == {
        "optimizer.betas_swapped": 1,
        "modules.momentum_of_keras": 1,
        "modules.keep_probability": 1,
        "modules.repeated": 0,
    }
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=1.0), nn.Dropout(0.8))
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.5, 0.999))
    assert set(settings(model, optimizer, UnusualSettingProbe()).values()) == {0.0}


def test_losses_in_train_mode_are_judged_in_a_run_of_many_evaluations() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = Watched([TrainModeLossProbe()])
    for pause in range(80):
        watched.run.losses_in_train_mode.append(100 * pause)
        model[1].eval() if pause < 75 else model[1].train()
        view = View(model, [optimizer])
        watched.emit(EventKind.BEFORE_UPDATE, 100 * pause + 1, model=view, optimizer=optimizer)
    assert [sample.value for sample in watched.samples][-5:] == [1.0] * 5
