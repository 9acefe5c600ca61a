"""Names of parameters, for models that nobody showed us."""

from __future__ import annotations

import pytest

from healthcheck.instrument.data import batch_counts
from healthcheck.instrument.modelview import LOOK_ANEW, FoundModel, canonical

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("module.blocks.0.weight", "blocks.0.weight"),
        ("_orig_mod.module.head.bias", "head.bias"),
        ("blocks.1._checkpoint_wrapped_module.fc._fsdp_wrapped_module.weight", "blocks.1.fc.weight"),
        ("module", ""),
        ("my_module.weight", "my_module.weight"),
        ("modules.0.weight", "modules.0.weight"),
    ],
)
def test_wrappers_do_not_show_in_names(given: str, name: str) -> None:
    """Rules and saved state must survive DDP, compile and checkpointing."""
    assert canonical(given) == name


def test_a_parameter_of_no_module_is_named_by_its_place_in_the_optimizer() -> None:
    model = torch.nn.Linear(2, 1)
    loose = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [loose]}], lr=0.1)
    view = FoundModel([model])
    view.add_optimizer(optimizer)

    assert [name for name, _ in view.named_parameters()] == ["weight", "bias", "group1.param0"]


def test_a_parameter_that_is_added_later_gets_its_name() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    view = FoundModel([model])
    view.add_optimizer(optimizer)
    view.named_parameters()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})

    assert [name for name, _ in view.named_parameters()][-1] == "group1.param0"


@pytest.mark.parametrize("kept", [False, True])
def test_a_layer_that_was_replaced_is_seen_after_some_questions(kept: bool) -> None:
    """The old one's parameters live on in the optimizer, and the old one itself perhaps in the script."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    view = FoundModel([model])
    view.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    view.named_parameters()
    old = model[1] if kept else None
    model[1] = torch.nn.Linear(2, 2)
    for _ in range(LOOK_ANEW):
        named = dict(view.named_parameters())

    assert named["1.weight"] is model[1].weight
    assert model[1] in [module for _, module in view.named_modules()]
    del old


def test_a_shared_parameter_is_listed_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight

    assert [name for name, _ in FoundModel([model]).named_parameters()] == ["0.weight", "0.bias", "1.bias"]


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        (torch.ones(4, 3), (4, None)),
        ((torch.ones(4, 3), torch.ones(4)), (4, None)),
        ({"input_ids": torch.ones(4, 7, dtype=torch.long), "labels": torch.ones(4)}, (4, 28)),
        ((torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)), (2, 10)),
        ([{"x": torch.ones(6, 1)}], (6, None)),
        (["a", "b"], (None, None)),
        (torch.tensor(1.0), (None, None)),
        (None, (None, None)),
    ],
)
def test_batches_are_counted_where_that_is_obvious(batch: object, counts: tuple[int | None, int | None]) -> None:
    assert batch_counts(batch) == counts
