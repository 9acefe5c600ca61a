"""Left in eval mode: forgotten, against frozen or switched on purpose."""

from __future__ import annotations

import torch
from driver import Everything, Loop, View, Watched
from torch import nn

from healthcheck.core.events import EventKind
from healthcheck.probes.modes import ModeProbe


def model_of() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    )


def watch(model: nn.Module) -> tuple[Loop, Watched]:
    watched = Watched([ModeProbe()])
    return Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.01)), watched


def test_a_forgotten_train_call_is_counted_from_its_step() -> None:
    model = model_of()
    loop, watched = watch(model)

    def loss() -> torch.Tensor:
        return model(torch.randn(8, 4)).pow(2).mean()

    loop.run(3, loss)
    model.eval()
    loop.run(2, loss)
    assert watched.values("modules.in_eval") == [0.0, 0.0, 0.0, 3.0, 3.0]
    assert watched.facts("modules.in_eval") == {"which": "1, 2, 4", "modules": "3 of 3 such layers"}
    model.train()
    loop.run(1, loss)
    assert watched.last("modules.in_eval") == 0


def test_layers_that_were_in_train_mode_only_until_the_first_look_are_counted() -> None:
    model = model_of()
    watched = Watched([ModeProbe()], Everything(every=10))
    loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.01))
    watched.emit(EventKind.TRAIN_START, 0, model=View(model))
    loop.run(4, lambda: model(torch.randn(8, 4)).pow(2).mean())
    model.eval()
    loop.run(16, lambda: model(torch.randn(8, 4)).pow(2).mean())
    assert watched.values("modules.in_eval") == [3.0, 3.0]


def test_a_part_that_was_forgotten_is_counted() -> None:
    model = nn.Sequential(model_of(), nn.Linear(2, 2))
    loop, watched = watch(model)
    loop.run(2, lambda: model(torch.randn(8, 4)).pow(2).mean())
    model[0].eval()
    loop.run(2, lambda: model(torch.randn(8, 4)).pow(2).mean())
    assert watched.last("modules.in_eval") == 3


def test_an_evaluation_between_steps_is_silent() -> None:
    model = model_of()
    loop, watched = watch(model)
    for _ in range(4):
        loop.one(lambda: model(torch.randn(8, 4)).pow(2).mean())
        model.eval()
        with torch.no_grad():
            model(torch.randn(8, 4))
        model.train()
    assert set(watched.values("modules.in_eval")) == {0.0}


def test_a_backbone_frozen_from_the_start_is_silent() -> None:
    backbone = model_of().requires_grad_(False)
    model = nn.Sequential(backbone, nn.Linear(2, 2))
    model.train()
    backbone.eval()
    loop, watched = watch(model)
    loop.run(4, lambda: model(torch.randn(8, 4)).pow(2).mean())
    assert set(watched.values("modules.in_eval")) == {0.0}


def test_a_backbone_frozen_half_way_is_silent() -> None:
    backbone = model_of()
    model = nn.Sequential(backbone, nn.Linear(2, 2)).train()
    loop, watched = watch(model)
    loop.run(2, lambda: model(torch.randn(8, 4)).pow(2).mean())
    backbone.requires_grad_(False).eval()
    loop.run(2, lambda: model(torch.randn(8, 4)).pow(2).mean())
    assert set(watched.values("modules.in_eval")) == {0.0}


def test_normalisation_layers_switched_one_by_one_are_silent() -> None:
    model = model_of()
    loop, watched = watch(model)
    loop.run(2, lambda: model(torch.randn(8, 4)).pow(2).mean())
    for module in model:
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    loop.run(2, lambda: model(torch.randn(8, 4)).pow(2).mean())
    assert set(watched.values("modules.in_eval")) == {0.0}


def test_a_model_without_such_layers_says_zero_in_either_mode() -> None:
    model = nn.Linear(4, 2).eval()
    loop, watched = watch(model)
    loop.run(2, lambda: model(torch.randn(8, 4)).pow(2).mean())
    assert watched.values("modules.in_eval") == [0.0, 0.0]


def test_the_model_of_the_fold_before_is_not_this_one() -> None:
    """Evaluated at its end, it is what the trainer still shows at the first loss of the next."""
    watched, shown = Watched([ModeProbe()]), None
    for fold in range(3):
        model = model_of()
        loop = Loop(watched, model, torch.optim.SGD(model.parameters(), lr=0.01), step=10 * fold)
        if shown is not None:
            loop.step += 1
            watched.emit(EventKind.LOSS, loop.step, model=shown, loss=torch.tensor(1.0))
            watched.emit(EventKind.BEFORE_UPDATE, loop.step, model=loop.view)
        loop.run(3, lambda m=model: m(torch.randn(8, 4)).pow(2).mean())
        model.eval()
        shown = loop.view
    assert len(watched.values("modules.in_eval")) == 9
    assert set(watched.values("modules.in_eval")) == {0.0}
