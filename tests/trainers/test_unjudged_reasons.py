"""Why a rule could not be judged: what a run did have is not given as the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import healthcheck
from healthcheck.run.ending import Ending

TRAIN = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
    for epoch in range(3):
        for x, y in torch.utils.data.DataLoader(data, batch_size=8):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
"""

EVALUATE = """
        model.eval()
        with torch.no_grad():
            for x, y in torch.utils.data.DataLoader(data, batch_size=8):
                model(x).argmax(1)
        model.train()
"""

EVAL_RULE = {"version": 1, "rules": {"eval-high": {"metric": "eval.loss", "when": {"above": 100}}}}


@pytest.mark.parametrize(
    ("text", "reason"), [(TRAIN, "no evaluation seen"), (TRAIN + EVALUATE, "no sample of eval.loss was seen")]
)
def test_an_evaluation_that_was_seen_is_not_denied(play: Callable, text: str, reason: str) -> None:
    played = play(text, rules=EVAL_RULE)

    assert bool(played.of("eval_start")) is (EVALUATE in text)
    assert _reasons(played) == {"eval-high": reason}


def test_a_graph_of_the_loss_that_was_seen_is_not_the_reason(play: Callable) -> None:
    latent = {"metric": "latent.kl", "when": {"above": 0.99}}
    alone = play(TRAIN, rules={"version": 1, "rules": {"latent": latent}})
    beside = play(
        TRAIN,
        rules={"version": 1, "rules": {"latent": latent, "sign": {"metric": "loss.maximised", "when": {"above": 9}}}},
    )

    lacks = "needs a divergence from a prior in the loss"
    assert _reasons(alone) == {"latent": lacks}
    assert _reasons(beside)["latent"] == lacks


def test_a_loss_that_was_told_without_its_graph_is_the_reason() -> None:
    latent = {"metric": "latent.kl", "when": {"above": 0.99}}
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = {"version": 1, "rules": {"latent": latent}}
    with healthcheck.watch(model, optimizer, rules=rules, console=False, record=False) as health:
        for _ in range(12):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            health.step(loss=1.0)

    verdict = health.session.report["rules"]["latent"]
    missing = "the loss was not seen before backward(); needs a divergence from a prior in the loss"
    assert (verdict["verdict"], verdict["reason"]) == ("not judged", missing)


def _reasons(played: Any) -> dict[str, str]:
    return {name: rule["reason"] for name, rule in played.session.finish(Ending())["rules"].items() if "reason" in rule}
