"""Loops without an optimizer: those that train by hand are told from those that do not train at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

RULES = {"version": 1, "rules": {"not-stepping": {"metric": "updates.missing", "when": {"at_least": 20}}}}

LOOP = """
    import torch
    torch.manual_seed(0)
    {setup}
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(12)))
    data = torch.randn(8, 3)
    for i in range(60):
        {before}
        model(data).square().mean().backward()
        {after}
"""

BY_HAND = {
    "data.add_": "for p in model.parameters(): p.data.add_(p.grad, alpha=-0.01)",
    "under no_grad": "with torch.no_grad(): [p.sub_(0.01 * p.grad) for p in model.parameters()]",
    "another storage": "for p in model.parameters(): p.data = p.data - 0.01 * p.grad",
    "copied from a vector": """w = torch.nn.utils.parameters_to_vector(p.data - 0.01 * p.grad for p in model.parameters())
        torch.nn.utils.vector_to_parameters(w, model.parameters())""",
    "only the last layer": "for p in model[-1].parameters(): p.data.add_(p.grad, alpha=-0.01)",
    "only the first layer": "for p in model[0].parameters(): p.data.add_(p.grad, alpha=-0.01)",
    "every fourth pass": "for p in model.parameters() if i % 4 == 3 else (): p.data.add_(p.grad, alpha=-0.01)",
}


@pytest.mark.parametrize("update", BY_HAND.values(), ids=BY_HAND.keys())
def test_weights_changed_by_hand_are_updates(play: Callable, update: str) -> None:
    played = play(LOOP.format(setup="", before="", after=update), rules=RULES)

    values = played.samples["updates.missing"]
    assert len(values) >= 50
    assert max(values) <= 4
    assert played.session.engine.alerts == []


def test_a_loop_that_changes_no_weight_has_no_update(play: Callable) -> None:
    played = play(LOOP.format(setup="", before="", after="model.zero_grad()"), rules=RULES)

    assert played.samples["updates.missing"] == [float(n) for n in range(1, 61)]
    assert [alert.rule for alert in played.session.engine.alerts] == ["not-stepping"]


def test_updates_by_hand_that_cease_are_missed(play: Callable) -> None:
    update = "for p in model.parameters() if i < 10 else (): p.data.add_(p.grad, alpha=-0.01)"
    played = play(LOOP.format(setup="", before="", after=update), rules=RULES)

    assert played.samples["updates.missing"][:11] == [1.0] * 11
    assert played.samples["updates.missing"][-1] == 50.0


def test_an_optimizer_that_lives_and_is_never_called_is_missed(play: Callable) -> None:
    loop = LOOP.format(
        setup="",
        before="optimizer = optimizer if i else torch.optim.SGD(model.parameters(), lr=0.1); optimizer.zero_grad()",
        after="",
    )
    assert [alert.rule for alert in play(loop, rules=RULES).session.engine.alerts] == ["not-stepping"]


def test_gradients_for_the_input_alone_ask_for_no_update(play: Callable) -> None:
    before = "model.requires_grad_(False); data = data.detach().requires_grad_()"
    played = play(LOOP.format(setup="", before=before, after=""), rules=RULES)

    assert "updates.missing" not in played.samples


def test_a_model_is_not_kept_alive_by_looking_for_updates(play: Callable) -> None:
    played = play(
        """
        import gc, torch, weakref
        def fit():
            model = torch.nn.Linear(3, 3)
            for _ in range(5):
                model(torch.ones(2, 3)).sum().backward()
                model.weight.data.sub_(0.1 * model.weight.grad)
            return weakref.ref(model.weight)
        weight = fit()
        gc.collect()
        assert weight() is None
        """,
        rules=RULES,
        listen=False,  # events that the fixture keeps hold graphs, and so weights
    )
    assert played.code == 0
