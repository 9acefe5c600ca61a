"""What was clipped for an update, and what was clipped for none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from healthcheck.assembly import open_session
from healthcheck.instrument.script import InProcess
from healthcheck.run.ending import Ending

pytestmark = pytest.mark.filterwarnings("ignore:`parameters` is an empty generator")

LOOP = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = (p for p in model.parameters())
    clip = torch.nn.utils.clip_grad_norm_
    def backward(): model(torch.ones(4, 2)).square().mean().backward()
    for i in range(40):
        {body}
"""
RULES = {
    "version": 1,
    "rules": {"missed": {"metric": "clip.missed", "when": {"above": 1}, "every": 10}},
}

ORDERS = {
    "in time": ("backward(); clip(model.parameters(), 1.0); optimizer.step(); optimizer.zero_grad()", 0.0),
    "after the update": ("backward(); optimizer.step(); clip(model.parameters(), 1.0); optimizer.zero_grad()", 1.0),
    "before the backward pass": (
        "optimizer.zero_grad(); clip(model.parameters(), 1.0); backward(); optimizer.step()",
        1.0,
    ),
    "used up": ("optimizer.zero_grad(); backward(); clip(kept, 1.0); optimizer.step()", 1.0),
    "a part": ("optimizer.zero_grad(); backward(); clip(model[0].parameters(), 1.0); optimizer.step()", 9 / 33),
    "part by part": (
        "optimizer.zero_grad(); backward(); [clip(m.parameters(), 1.0) for m in model]; optimizer.step()",
        0.0,
    ),
    "by value": (
        "backward(); torch.nn.utils.clip_grad_value_(model.parameters(), 1.0); optimizer.step(); optimizer.zero_grad()",
        0.0,
    ),
    "in time, and read again": (
        "backward(); clip(model.parameters(), 1.0); optimizer.step(); clip(model.parameters(), 1.0); optimizer.zero_grad()",
        0.0,
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_what_clipping_left_out_of_an_update_is_told(case: str, play: Callable) -> None:
    body, missed = ORDERS[case]

    played = play(LOOP.format(body=body), rules=RULES)

    assert played.samples["clip.missed"][-1] == pytest.approx(missed)


UNKNOWN = {
    "no clipping": "optimizer.zero_grad(); backward(); optimizer.step()",
    "the norm is only read": 'optimizer.zero_grad(); clip(model.parameters(), float("inf")); backward(); optimizer.step()',
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_a_loop_that_does_not_clip_says_nothing(case: str, play: Callable) -> None:
    assert "clip.missed" not in play(LOOP.format(body=UNKNOWN[case]), rules=RULES).samples


def test_the_norm_of_gradients_that_were_applied_is_not_that_of_the_next_update(play: Callable) -> None:
    body = "backward(); optimizer.step(); clip(model.parameters(), 1.0); optimizer.zero_grad()"

    played = play(LOOP.format(body=body))

    assert [e.max_norm for e in played.of("before_update")] == [None] * 40
    assert all(e.grad_norm is None for e in played.of("before_update"))


def test_gradients_that_no_backward_pass_made_are_clipped_like_others(play: Callable) -> None:
    played = play(
        """
        import torch
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        weights = list(model.parameters())
        for i in range(12):
            for p, g in zip(weights, torch.autograd.grad(model(torch.ones(4, 2)).sum(), weights)):
                p.grad = g
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
        """,
        rules=RULES,
    )

    assert set(played.samples.get("clip.missed", [0.0])) == {0.0}


def test_a_framework_that_announces_its_update_before_it_clips_for_it_has_not_clipped_in_vain() -> None:
    """As Dream Trainer does: its ``step`` checks, clips and updates."""
    torch = pytest.importorskip("torch")
    session = open_session(target="t", rules="healthcheck:wiring", console=False, record=False)
    watching = InProcess(session)
    with watching:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(60):
            model(torch.randn(4, 2)).square().mean().backward()
            watching.machine.update_begins(optimizer, announced=True)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    session.finish(Ending())
    assert [alert.name for alert in session.alerts] == []
    assert session.step == 60
