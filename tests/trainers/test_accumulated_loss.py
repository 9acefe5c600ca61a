"""The loss of a step is the one that the script prints, whichever way it accumulates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

LOOP = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    printed = []
    for step in range(4):
        total = 0.0
        for micro in range({micro}):
            loss = model(torch.randn(8, 3)).pow(2).mean()
            {backward}
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        printed.append(total / {divided})
    import builtins
    builtins.printed_losses = printed
"""
RULES = {"version": 1, "rules": {"loss": {"metric": "loss", "when": {"above": 1e9}}}}


@pytest.mark.parametrize(
    ("micro", "backward", "divided"),
    [
        (4, "(loss / 4).backward()", 4),
        (4, "loss.backward()", 4),
        (3, "loss.div(3).backward()", 3),
        (1, "(loss / 2).backward()", 0.5 * 4),  # half the loss is what is trained on
        (2, "torch.amp.GradScaler('cpu', init_scale=1024.0).scale(loss / 2).backward()", 2),
    ],
)
def test_the_step_loss_is_the_one_printed(play: Callable[..., Any], micro: int, backward: str, divided: float) -> None:
    import builtins

    played = play(LOOP.format(micro=micro, backward=backward, divided=divided if micro > 1 else 2), rules=RULES)
    seen = [value for _, value in played.session.history("loss")]
    assert seen == pytest.approx(builtins.printed_losses)  # type: ignore[attr-defined]


def test_a_last_step_with_fewer_parts_is_added_up_too(play: Callable[..., Any]) -> None:
    played = play(
        """
        import torch
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with torch.no_grad():
            model.weight.fill_(1.0)
        for parts in (4, 4, 2):
            for _ in range(parts):
                (model(torch.full((1, 1), 2.0)).mean() / 4).backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
        rules=RULES,
    )
    assert [value for _, value in played.session.history("loss")] == pytest.approx([2.0, 2.0, 1.0])
