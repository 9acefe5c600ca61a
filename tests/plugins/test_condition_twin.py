"""A condition written as the guide says and its built-in twin: the same report on the same series.

`mine.times_median` of docs/plugins/writing-a-condition.md is `ratio` to the median, written anew over public names.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import healthcheck
from healthcheck.testing import play

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "plugins" / "writing-a-condition.md"
ITS_NAME, ITS_TWIN = "mine.times_median", "ratio"


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    [block] = [text for text in blocks if ITS_NAME in text]
    (tmp_path / "mine.py").write_text(block)
    return str(tmp_path / "mine.py")


def series(seed: int, length: int = 160) -> list[float | None]:
    draw = random.Random(seed)
    level, values = 2.0, []
    for _ in range(length):
        event = draw.random()
        if event < 0.05:
            level *= draw.choice([0.4, 2.5])
        value: float | None = level * (1 + 0.05 * draw.gauss(0, 1))
        if event > 0.93:
            value = draw.choice([None, math.nan, math.inf, 0.0, -3.0, 9 * level])
        values.append(value)
    return values


def with_condition(name: str, **keys: Any) -> dict[str, Any]:
    """Rules with one condition or the other, alone and as a part."""
    when = {name: {"above": 2.5, "window": 20}}
    other = {"metric": "x", "above": 0}
    rules = {
        "alone": {"metric": "loss", "when": when, "for": "2 of 3", "recover": {"below": 1.5}, **keys},
        "all-of": {"metric": "loss", "when": {"all": [when, other]}, **keys},
        "any-of": {"metric": "loss", "when": {"any": [when, {"unchanged": {"over": 3}}]}},
        "seldom": {"metric": "loss", "when": when, "every": 3, "warmup": 10, "cooldown": 5},
    }
    return {"version": 1, "external": ["x"], "rules": rules}


def as_told(report: dict[str, Any]) -> dict[str, Any]:
    """What a report says of rules and alerts, without the name of the condition and the time of day."""
    kept = {key: report[key] for key in ("rules", "alerts", "verdict", "exit_code", "steps")}
    return json.loads(json.dumps(kept).replace(ITS_NAME, ITS_TWIN))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "keys",
    [{}, {"outliers": "exclude"}, {"outliers": "clip", "reseed": 4}, {"min_samples": 3}],
    ids=lambda keys: "-".join(keys) or "plain",
)
def test_both_give_the_same_report(plugin: str, seed: int, keys: dict[str, Any]) -> None:
    numbers = {"loss": series(seed), "x": [1.0, None, -1.0, 1.0] * 40}

    built_in = play(with_condition(ITS_TWIN, **keys), numbers)
    mine = play(with_condition(ITS_NAME, **keys), numbers, plugins=[plugin])

    assert as_told(mine.report) == as_told(built_in.report)
    assert built_in.report["alerts"]
    closest = {name: rule.get("closest") for name, rule in mine.report["rules"].items()}
    assert None not in closest.values()


def saved_state(played: Any) -> dict[str, Any]:
    """Detector state by rule; what a scorer remembers as a list, whatever it is called."""
    state = played.session.engine.state_dict()
    rules = {}
    for name in ("alone", "seldom"):
        entry = json.loads(json.dumps(state["causes"][name]).replace(ITS_NAME, ITS_TWIN))
        for one in entry["series"]:
            one["scorer"] = [*one["scorer"].values()] if isinstance(one["scorer"], dict) else one["scorer"]
        rules[name] = entry
    return rules


def test_both_save_the_same_state_and_go_on_from_it(plugin: str) -> None:
    first, second = {"loss": series(3)}, {"loss": series(4)}
    keys = {"outliers": "clip", "reseed": 4}
    built_in, mine = (
        play(with_condition(ITS_TWIN, **keys), first),
        play(with_condition(ITS_NAME, **keys), first, plugins=[plugin]),
    )
    assert saved_state(mine) == saved_state(built_in)

    told = []
    for name, before, plugins in ((ITS_TWIN, built_in, []), (ITS_NAME, mine, [plugin])):
        session = healthcheck.testing.open_test_session(with_condition(name, **keys), plugins=plugins)
        saved = json.loads(json.dumps(before.session.engine.state_dict(), allow_nan=False))
        assert session.engine.load_state_dict(saved) == []
        after = play(session, second)
        told.append(
            [
                (a.rule, a.fired_step, repr(a.value), a.score, a.normal, a.message.replace(ITS_NAME, ITS_TWIN))
                for a in after.alerts
            ]
        )
    assert told[0] == told[1]
    assert told[0]


def trained(name: str, plugins: list[str], bad: dict[int, float]) -> tuple[list[torch.Tensor], Any]:
    """A real loop; the gradients of some steps are far too large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(4, 6)
    when = {name: {"above": 50, "window": 20}}
    rules = {
        "version": 1,
        "rules": {
            "jump": {"metric": "grad_norm", "when": when, "min_samples": 4, "outliers": "exclude", "then": ["skip_update"]},
            "held": {"metric": "updates.skipped", "when": {"above": 100}},
        },
    }  # fmt: skip
    with healthcheck.watch(model, optimizer, rules=rules, plugins=plugins, console=False, record=False) as health:
        for step in range(1, 16):
            optimizer.zero_grad()
            loss = model(data).pow(2).mean() * bad.get(step, 1.0)
            loss.backward()
            optimizer.step()
            health.step(loss=loss)
    return [p.detach().clone() for p in model.parameters()], health


def test_both_hold_back_the_same_updates_of_a_real_loop(plugin: str) -> None:
    bad = {2: 1e4, 8: 1e4, 11: 1e6, 12: 1e6}
    weights, built_in = trained(ITS_TWIN, [], bad)
    mine_weights, mine = trained(ITS_NAME, [plugin], bad)

    assert all(torch.equal(a, b) for a, b in zip(weights, mine_weights, strict=True))
    held = [step for step, value in mine.history("updates.skipped") if value]
    assert held == [step for step, value in built_in.history("updates.skipped") if value] == [8, 11, 12]
    alerts = [[{**a, "time": 0.0} for a in as_told(health.report)["alerts"]] for health in (mine, built_in)]
    assert alerts[0] == alerts[1]
    assert mine.report["alerts"][0]["actions"][0]["done"]
