"""``session.untimed()``: steps that are slowed down on purpose enter no step time and no cost of watching."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import healthcheck
from healthcheck.testing import FakeTrainer, open_test_session

RULES = {
    "version": 1,
    "rules": {
        "slow": {"metric": "time.step", "when": {"above": 1e9}},
        "pace": {"metric": "throughput", "when": {"below": 0}},
    },
}


def test_times_of_such_steps_are_left_out_and_the_time_stands_still() -> None:
    session = open_test_session(RULES)
    trainer = FakeTrainer(session)
    trainer.run(5)
    before = session.active()
    over = session.untimed()
    trainer.run(5)
    assert session.active() == before
    over()
    over()  # twice is once
    trainer.run(5)
    timed = [step for step, _ in session.history("time.step")]
    trainer.finish()
    assert timed == [2, 3, 4, 5, 11, 12, 13, 14, 15]


@pytest.mark.parametrize("rows", [True, False])
def test_a_loop_that_is_noted_in_rows_leaves_the_same_steps_out(rows: bool) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    heard: list[Any] = []
    with healthcheck.watch(model, optimizer, rules=RULES, record=False, console=False) as health:
        session = health.session
        if not rows:
            session.on("step_end", heard.append)
        over = lambda: None  # noqa: E731
        for step in range(1, 41):
            if step == 11:
                over = session.untimed()
            if step == 31:
                over()
            if 11 <= step <= 30:
                time.sleep(0.02)
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    timed = dict(session.history("time.step"))
    assert {*range(3, 10), *range(33, 40)} <= timed.keys()
    assert not {*range(12, 31)} & timed.keys()
    assert max(timed.values()) < 0.02 * 20
    assert session.active() < 0.02 * 20 + 5


def test_what_happens_in_hooks_meanwhile_is_no_cost_of_watching() -> None:
    session = open_test_session(RULES)
    trainer = FakeTrainer(session)
    over = session.untimed()
    session.on("step_end", lambda *_: time.sleep(0.05))
    trainer.run(4)
    over()
    assert session.own_ns < 0.05e9
    trainer.finish()
