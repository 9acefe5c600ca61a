"""One step in twenty is watched: a NaN and a spike of one single step between two looks are found all the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from healthcheck.assembly import open_session
from healthcheck.core.errors import StopTraining
from healthcheck.instrument.script import InProcess
from healthcheck.run.session import Session

EVERY = 20
RULES = """
version: 1
rules:
  grads-not-finite: {metric: grad_nonfinite, when: {above: 0}, severity: error, then: [stop]}
  spike: {metric: grad_norm, when: {above: 1000.0}}
  learnt-spike: {metric: grad_norm, when: {robust_z: {above: 20, window: 50}}, warmup: 200}
"""


def watched(
    steps: int, *, at: int, factor: float, clip: bool = False, first: int = 0, into: list[Session] | None = None
) -> Session:
    """Train on the card; the gradients of one single step are multiplied, unseen by loss and weights.

    :param first: steps at the beginning that are all watched.
    :param into: gets the session, for a training that is stopped.
    """
    session = open_session(target="t", rules=RULES, console=False, record=False)
    if into is not None:
        into.append(session)

    def step_over(step: int, own_ns: int, active: float) -> int:
        return 0 if session.budget.whole or step < first else EVERY - 1 - step % EVERY

    session.budget.binds_at, session.budget.binds = 0, True
    session.budget.step_over = step_over  # type: ignore[method-assign]
    session.budget.affords = lambda launch_ns: True  # type: ignore[method-assign]
    with InProcess(session):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        inputs = torch.randn(32, 64, device="cuda")
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            before = [p.detach().clone() for p in model.parameters()]
            if step == at:
                for p in model.parameters():
                    assert p.grad is not None
                    p.grad.mul_(factor)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step == at:
                with torch.no_grad():
                    for p, old in zip(model.parameters(), before, strict=True):
                        p.copy_(old)
        torch.cuda.synchronize()
    assert session.internal_errors == [] == session.dispatch.errors
    return session


def fired(session: Session) -> list[tuple[str, int]]:
    return [(alert.rule, alert.fired_step) for alert in session.alerts]


@pytest.mark.parametrize("clip", [False, True])
def test_a_spike_of_a_single_step_is_found_with_its_step(clip: bool) -> None:
    session = watched(130, at=67, factor=1e7, clip=clip)
    assert ("spike", 67) in fired(session)
    assert [step for step, _ in session.history("grad_norm") if step % EVERY].count(67) == 1


def test_a_spike_is_measured_by_the_bound_that_was_learnt_before() -> None:
    session = watched(400, at=347, factor=50.0, first=300)
    assert fired(session) == [("learnt-spike", 347)]


def test_a_gradient_that_is_not_finite_in_a_single_step_is_found_with_its_step() -> None:
    sessions = list[Session]()
    with pytest.raises(StopTraining) as stopped:
        watched(130, at=67, factor=math.nan, into=sessions)
    assert stopped.value.rule == "grads-not-finite"
    assert ("grads-not-finite", 67) in fired(sessions[0])


def test_healthy_steps_between_two_looks_raise_nothing_and_wait_for_nothing() -> None:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        session = watched_without_waits()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert fired(session) == []
    between = [sample for sample in session.history("grad_norm") if sample[0] % EVERY]
    assert len(between) >= 3  # the largest norm of each gap


def watched_without_waits() -> Session:
    session = open_session(target="t", rules=RULES, console=False, record=False)
    session.budget.binds_at, session.budget.binds = 0, True
    session.budget.step_over = lambda step, own_ns, active: EVERY - 1 - step % EVERY  # type: ignore[method-assign]
    session.budget.affords = lambda launch_ns: True  # type: ignore[method-assign]
    with InProcess(session):
        model = nn.Linear(64, 1, device="cuda")
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-4)
        inputs = torch.ones(32, 64, device="cuda")
        for _ in range(100):
            optimizer.zero_grad(set_to_none=False)
            model(inputs).square().mean().backward()
            optimizer.step()
    return session
