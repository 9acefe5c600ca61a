"""``locate``: real faults in real models, named by module, operation and line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from locating import Apply, Net, told, train
from torch import nn
from torch.nn import functional as F

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
