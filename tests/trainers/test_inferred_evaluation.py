"""The loss of an evaluation that a script computes and does not log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RULES = {"version": 1, "rules": {"wants-it": {"metric": "eval.loss", "phase": "any", "when": {"above": 1e9}}}}

HEAD = """
    import copy, torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset
    torch.manual_seed(0)
    x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))
    held_x, held_y = torch.randn(20, 6), torch.randint(0, 3, (20,))
    train, held = DataLoader(TensorDataset(x, y), 8, shuffle=True), DataLoader(TensorDataset(held_x, held_y), 8)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    criterion = nn.CrossEntropyLoss()
    true = []
    def whole(net):
        was = net.training
        net.eval()
        logits = net(held_x).log_softmax(1)
        net.train(was)
        return -logits[range(20), held_y].mean().item()
"""

STYLES = {
    "a loader, eval() and no_grad": """
    for epoch in range(4):
        model.train()
        for a, b in train:
            optimizer.zero_grad(); criterion(model(a), b).backward(); optimizer.step()
        true.append(whole(model)); model.eval()
        with torch.no_grad():
            for a, b in held: criterion(model(a), b)
    """,
    "no_grad inside the loop over the loader": """
    for epoch in range(4):
        model.train()
        for a, b in train:
            optimizer.zero_grad(); F.cross_entropy(model(a), b).backward(); optimizer.step()
        true.append(whole(model)); model.eval()
        for a, b in held:
            with torch.no_grad(): F.cross_entropy(model(a), b)
    """,
    "train(False) and tensors without a loader": """
    for epoch in range(4):
        model.train()
        for i in range(0, 24, 8):
            optimizer.zero_grad(); F.cross_entropy(model(x[i:i + 8]), y[i:i + 8]).backward(); optimizer.step()
        true.append(whole(model)); model.train(False)
        with torch.inference_mode():
            for i in range(0, 20, 8): F.cross_entropy(model(held_x[i:i + 8]), held_y[i:i + 8])
    """,
    "train(False) and a loader outside no_grad": """
    for epoch in range(4):
        model.train()
        for a, b in train:
            optimizer.zero_grad(); F.cross_entropy(model(a), b).backward(); optimizer.step()
        true.append(whole(model)); model.train(False)
        for a, b in held:
            with torch.no_grad(): F.cross_entropy(model(a), b)
    """,
    "eval() only once the first batch is there": """
    for epoch in range(4):
        model.train()
        for a, b in train:
            optimizer.zero_grad(); criterion(model(a), b).backward(); optimizer.step()
        true.append(whole(model))
        for a, b in held:
            model.eval()
            with torch.no_grad(): criterion(model(a), b)
    """,
    "updates by hand": """
    for epoch in range(4):
        model.train()
        for a, b in train:
            model.zero_grad(); F.cross_entropy(model(a), b).backward()
            with torch.no_grad():
                for p in model.parameters(): p -= 0.05 * p.grad
        true.append(whole(model)); model.eval()
        with torch.no_grad():
            for a, b in held: F.cross_entropy(model(a), b)
    """,
    "sums that the script divides itself": """
    for epoch in range(4):
        model.train()
        for a, b in train:
            optimizer.zero_grad(); F.nll_loss(model(a).log_softmax(1), b).backward(); optimizer.step()
        true.append(whole(model)); model.eval()
        with torch.no_grad():
            for a, b in held: F.nll_loss(model(a).log_softmax(1), b, reduction="sum").item()
    """,
    "a loss of each row": """
    rows = nn.CrossEntropyLoss(reduction="none")
    for epoch in range(4):
        model.train()
        for a, b in train:
            optimizer.zero_grad(); rows(model(a), b).mean().backward(); optimizer.step()
        true.append(whole(model)); model.eval()
        with torch.no_grad():
            for a, b in held: rows(model(a), b)
    """,
    "an averaged copy": """
    ema = copy.deepcopy(model).eval()
    for epoch in range(4):
        for a, b in train:
            optimizer.zero_grad(); criterion(model(a), b).backward(); optimizer.step()
            with torch.no_grad():
                for p, q in zip(ema.parameters(), model.parameters()): p.lerp_(q, 0.5)
        true.append(whole(ema))
        with torch.no_grad():
            for a, b in held: criterion(ema(a), b)
    """,
    "train mode that was forgotten": """
    model[2].p = 0.0
    for epoch in range(4):
        for a, b in train:
            optimizer.zero_grad(); criterion(model(a), b).backward(); optimizer.step()
        true.append(whole(model))
        with torch.no_grad():
            for a, b in held: criterion(model(a), b)
    """,
    "smoothed labels in training, by the loop's own code": """
    for epoch in range(4):
        model.train()
        for a, b in train:
            logs = model(a).log_softmax(1)
            loss = -0.9 * logs.gather(1, b[:, None]).mean() - 0.1 * logs.mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
        true.append(whole(model)); model.eval()
        with torch.no_grad():
            for a, b in held: criterion(model(a), b)
    """,
}


@pytest.mark.parametrize("style", STYLES)
def test_the_loss_of_an_evaluation_is_the_mean_over_its_rows(play: Callable[..., Any], style: str) -> None:
    main: dict[str, Any] = {}

    def keep(session: Any, event: Any) -> None:
        import sys

        main.update(vars(sys.modules["__main__"]))

    played = play(HEAD + STYLES[style], rules=RULES, on={"train_end": keep})

    assert played.code == 0
    assert played.samples["eval.loss"] == pytest.approx(main["true"], rel=1e-5)
    assert all(event.inferred for event in played.of("eval_end"))


NO_EVALUATION = {
    "the hard rows of each batch are chosen": """
    for epoch in range(4):
        for a, b in train:
            with torch.no_grad(): losses = F.cross_entropy(model(a), b, reduction="none")
            hard = losses.topk(4).indices
            optimizer.zero_grad(); F.cross_entropy(model(a[hard]), b[hard]).backward(); optimizer.step()
    """,
    "the hard rows are chosen in evaluation mode": """
    for epoch in range(4):
        for a, b in train:
            model.eval()
            with torch.no_grad(): losses = F.cross_entropy(model(a), b, reduction="none")
            model.train(); hard = losses.topk(4).indices
            optimizer.zero_grad(); F.cross_entropy(model(a[hard]), b[hard]).backward(); optimizer.step()
    """,
    "a teacher's loss is computed on the batch of the step": """
    teacher = copy.deepcopy(model).eval()
    for epoch in range(4):
        for a, b in train:
            with torch.no_grad(): weight = F.cross_entropy(teacher(a), b)
            optimizer.zero_grad(); (weight * criterion(model(a), b)).backward(); optimizer.step()
    """,
    "the batch is looked at again after its update": """
    for epoch in range(4):
        for a, b in train:
            optimizer.zero_grad(); criterion(model(a), b).backward(); optimizer.step()
            with torch.no_grad(): criterion(model(a), b)
    """,
    "a value function is checked on what it was trained on": """
    value, returns = nn.Linear(6, 1), torch.randn(24, 1)
    optimizer = torch.optim.Adam(value.parameters(), 0.01)
    for update in range(4):
        for epoch in range(2):
            for i in range(0, 24, 8):
                optimizer.zero_grad(); F.mse_loss(value(x[i:i + 8]), returns[i:i + 8]).backward(); optimizer.step()
        with torch.no_grad(): F.mse_loss(value(x), returns)
    """,
    "nothing is trained yet": """
    model.eval()
    with torch.no_grad():
        for a, b in held: criterion(model(a), b)
    model.train()
    for a, b in train:
        optimizer.zero_grad(); criterion(model(a), b).backward(); optimizer.step()
    """,
}


@pytest.mark.parametrize("use", NO_EVALUATION)
def test_a_loss_that_is_computed_without_gradients_for_another_reason_is_no_evaluation(
    play: Callable[..., Any], use: str
) -> None:
    played = play(HEAD + NO_EVALUATION[use], rules=RULES)

    assert played.code == 5  # the only rule had nothing to judge
    assert "eval.loss" not in played.samples


def test_several_sets_are_told_apart_by_their_loaders(play: Callable[..., Any]) -> None:
    played = play(
        HEAD
        + """
    other = DataLoader(TensorDataset(held_x + 3, held_y), 10)
    for epoch in range(3):
        model.train()
        for a, b in train:
            optimizer.zero_grad(); criterion(model(a), b).backward(); optimizer.step()
        model.eval()
        with torch.no_grad():
            for a, b in held: criterion(model(a), b)
            for a, b in other: criterion(model(a), b)
    """,
        rules=RULES,
    )

    assert {name: len(values) for name, values in played.samples.items() if name.startswith("eval")} == {
        "eval.loss[dataset=held]": 3,
        "eval.loss[dataset=other]": 3,
    }


def test_a_loss_that_the_script_adds_up_over_the_batch_is_compared_in_its_own_unit(play: Callable[..., Any]) -> None:
    played = play(
        HEAD
        + """
    criterion = nn.MSELoss(reduction="sum")
    net = nn.Linear(6, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    ones = DataLoader(TensorDataset(x, torch.ones(24, 1)), 8)
    for epoch in range(3):
        net.train()
        for a, b in ones:
            optimizer.zero_grad(); criterion(net(a), b).backward(); optimizer.step()
        net.eval()
        with torch.no_grad():
            for a, b in DataLoader(TensorDataset(held_x, torch.full((20, 1), 2.0)), 4): criterion(net(a), b)
    """,
        rules=RULES,
    )

    assert played.samples["eval.loss"] == [32.0, 32.0, 32.0]  # 4 for a row, and 8 rows in a batch of training


def test_what_the_script_logs_itself_is_taken_as_it_is(play: Callable[..., Any]) -> None:
    played = play(
        HEAD
        + """
    import healthcheck
    for epoch in range(3):
        model.train()
        for a, b in train:
            optimizer.zero_grad(); criterion(model(a), b).backward(); optimizer.step()
        model.eval()
        with torch.no_grad():
            for a, b in held: criterion(model(a), b)
        healthcheck.log(**{"eval.loss": 7.0})
    """,
        rules=RULES,
    )

    assert played.samples["eval.loss"] == [7.0, 7.0, 7.0]


def test_a_loss_that_is_not_finite_in_an_evaluation_is_found(play: Callable[..., Any]) -> None:
    played = play(
        HEAD
        + """
    for epoch in range(3):
        model.train()
        for a, b in train:
            optimizer.zero_grad(); criterion(model(a), b).backward(); optimizer.step()
        model.eval()
        with torch.no_grad():
            for a, b in held: criterion(model(a / (epoch < 2)), b)
    """,
        rules={"version": 1, "rules": {"bad": {"metric": "eval.loss", "phase": "eval", "when": "nonfinite"}}},
    )

    alert = played.session.alerts[0]
    assert (alert.rule, alert.fired_step) == ("bad", 9)
    assert alert.facts["inferred"] == "mean of cross_entropy over 3 calls without gradients"


def test_scripted_and_compiled_losses_work_as_without_us(
    play: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    play(
        """
    import torch, torch._dynamo
    from torch import nn
    from torch.nn import functional as F
    class Net(nn.Module):
        def __init__(self):
            super().__init__(); self.layer = nn.Linear(4, 3)
        def forward(self, x, y):
            return F.cross_entropy(self.layer(x), y)
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    for net in torch.jit.script(Net()), torch.compile(Net(), backend="eager", fullgraph=True):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for i in range(4):
            optimizer.zero_grad(); net(x, y).backward(); optimizer.step()
        print(round(net(x, y).item(), 4))
    """,
        rules=RULES,
    )

    scripted, compiled = capsys.readouterr().out.split()
    assert 0 < float(scripted) < 2
    assert 0 < float(compiled) < 2
