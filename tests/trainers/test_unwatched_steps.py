"""Steps that nobody watches: they cost next to nothing, are counted, and what must not be missed in them is not."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import healthcheck
from healthcheck.assembly import open_session
from healthcheck.core.errors import StopTraining
from healthcheck.device.between import WORDS, hand_out, take_up
from healthcheck.device.deferred import DeviceVector
from healthcheck.instrument.script import InProcess
from healthcheck.probes import gradients
from healthcheck.run.ending import Ending
from healthcheck.run.session import Session

RULES = """
version: 1
rules:
  loss-not-finite: {metric: loss, when: nonfinite, severity: error, then: [stop]}
  grads-not-finite: {metric: grad_nonfinite, when: {above: 0}, severity: error, then: [stop]}
  norm: {metric: grad_norm, when: {above: 1000000000.0}}
  time: {metric: time.step, when: {above: 1000000000.0}}
"""
EVERY = 20


@contextmanager
def one_in(every: int, rules: str = RULES, **more: Any) -> Iterator[tuple[Session, InProcess]]:
    """A session that watches one step in so many, from the first step on."""
    session = open_session(target="t", rules=rules, console=False, record=False, **more)

    def step_over(step: int, own_ns: int, active: float) -> int:
        return 0 if session.budget.whole else every - 1 - step % every

    session.budget.binds_at, session.budget.binds = 0, True
    session.budget.step_over = step_over  # type: ignore[method-assign]
    session.budget.affords = lambda launch_ns: True  # type: ignore[method-assign]
    watching = InProcess(session)
    with watching:
        yield session, watching


def steps_of(session: Session, metric: str) -> list[int]:
    return [step for step, _ in session.history(metric, 1000)]


def model_and_optimizer(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(steps: int, *, bad: int = 0, seed: int = 0) -> nn.Module:
    model, optimizer = model_and_optimizer(seed)
    for step in range(1, steps + 1):
        loss = model(torch.randn(8, 4)).square().mean()
        if step == bad:
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def test_one_step_in_twenty_is_watched_under_its_own_number() -> None:
    with one_in(EVERY) as (session, _):
        train(103)
    assert steps_of(session, "loss") == [1, 20, 40, 60, 80, 100]
    assert steps_of(session, "grad_norm") == [1, 20, 40, 60, 80, 100]
    assert session.step == 103
    assert session.internal_errors == [] == session.dispatch.errors


def test_weights_are_those_of_an_unwatched_run_bit_for_bit() -> None:
    with one_in(EVERY):
        watched = train(60)
    for one, other in zip(watched.parameters(), train(60).parameters(), strict=True):
        assert torch.equal(one, other)


def test_nothing_of_ours_is_called_in_a_step_that_is_left_out_but_the_hooks() -> None:
    with one_in(1000) as (session, watching):
        train(3)
        assert watching.machine.unwatched.left
        session.emit = session.board.begin_step = None  # type: ignore[method-assign, assignment]
        train(50)
    assert session.step == 53


def test_what_is_logged_in_a_step_that_is_left_out_belongs_to_it() -> None:
    rules = RULES.replace("rules:", "external: [late, early]\nrules:")
    model, optimizer = model_and_optimizer()
    with one_in(EVERY, rules) as (session, _):
        for step in range(1, 60):
            if step > 32:
                healthcheck.log(early=float(step))
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if step > 30:
                healthcheck.log(late=float(step))
        session.judge_now()
        steps = {name: [(at, int(value)) for at, value in session.history(name, 1000)] for name in ("late", "early")}
    assert steps["late"] == [(step, step) for step in range(31, 60)]
    assert steps["early"] == [(step, step) for step in range(33, 60)]


@pytest.mark.parametrize("bad", [27, 41])
def test_a_loss_that_is_not_finite_is_found_in_its_own_step_and_stops_the_run(bad: int) -> None:
    with one_in(EVERY) as (session, watching), pytest.raises(StopTraining):
        train(60, bad=bad)
    assert (session.alerts[0].rule, session.alerts[0].fired_step) == ("loss-not-finite", bad)
    assert session.stop.request is not None
    assert session.stop.request.step == bad
    assert watching.machine.number <= bad + 1


def test_nobody_looks_at_losses_for_rules_that_only_warn() -> None:
    """Reading a number is cheap, but not for nothing."""
    rules = "version: 1\nrules: {norm: {metric: grad_norm, when: {above: 5000000}}}"
    with one_in(EVERY, rules) as (session, watching):
        train(5)
        assert not watching.machine.unwatched._looks
    assert steps_of(session, "grad_norm") == [1]


def test_several_optimizers_take_their_turns_while_nobody_watches() -> None:
    def train_two() -> None:
        torch.manual_seed(0)
        first, second = nn.Linear(4, 4), nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (first, second)]
        for step in range(1, 50):
            for optimizer in optimizers:
                loss = second(first(torch.randn(8, 4))).square().mean()
                if step == 33 and optimizer is optimizers[1]:
                    loss = loss * float("inf")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    with one_in(10) as (session, _), pytest.raises(StopTraining):
        train_two()
    assert session.history("loss[optimizer=1]")[-1][0] == 33
    assert steps_of(session, "loss") == [1, 10, 20, 30]


def test_a_second_optimizer_that_nobody_knows_ends_what_is_left_out() -> None:
    with one_in(1000) as (session, watching):
        train(5)
        assert watching.machine.unwatched.left
        train(1, seed=1)
    assert steps_of(session, "grad_norm")[-1] == 6


def test_an_evaluation_between_steps_that_are_left_out_has_its_step() -> None:
    rules = RULES + "  eval: {metric: eval.loss, when: {above: 5000000}}\n"
    with one_in(1000, rules) as (session, watching):
        train(12)
        watching.machine.evaluations.logged({"eval/loss": 1.0})
        train(5)
    assert steps_of(session, "eval.loss") == [12]


def test_max_steps_ends_the_run_where_it_was_asked_to_end() -> None:
    with one_in(1000, max_steps=17) as (session, _), pytest.raises(StopTraining):
        train(60)
    assert session.step == 17


def test_a_stop_that_is_asked_for_meanwhile_is_heeded_at_the_next_step() -> None:
    with one_in(1000) as (session, watching):
        train(4)
        assert watching.machine.unwatched.left
        assert session.controls is not None
        session.controls.request_stop("enough", rule="", step=4, mode="graceful", exit_code=0)
        with pytest.raises(StopTraining):
            train(5)
    assert session.step <= 6


def test_a_loop_of_ones_own_counts_its_steps() -> None:
    model, optimizer = model_and_optimizer()
    with healthcheck.watch(model, optimizer, rules=RULES, console=False, record=False) as health:
        session = health.session
        assert session is not None
        session.budget.binds_at, session.budget.binds = 0, True
        session.budget.step_over = lambda step, own_ns, active: EVERY - 1 - step % EVERY  # type: ignore[method-assign]
        for _ in range(45):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            health.step(loss=loss)
    assert steps_of(session, "loss") == [1, 20, 40]
    assert session.step == 45


def test_steps_without_an_optimizer_are_counted_by_their_passes() -> None:
    with one_in(EVERY) as (session, _):
        torch.manual_seed(0)
        weight = nn.Linear(4, 1)
        for _ in range(50):
            weight(torch.randn(8, 4)).square().mean().backward()
            with torch.no_grad():
                for p in weight.parameters():
                    assert p.grad is not None
                    p -= 0.01 * p.grad
                    p.grad = None
    assert session.unit == "backward"
    assert steps_of(session, "grad_norm")[-1] == 40
    assert session.step == 50


def test_the_time_of_a_watched_step_is_its_own_not_that_of_the_gap(virtual_time: Any) -> None:
    import time

    with one_in(EVERY) as (session, _):
        model, optimizer = model_and_optimizer()
        for _ in range(70):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            time.sleep(0.01)
            optimizer.step()
    assert steps_of(session, "time.step") == [20, 40, 60]
    assert [value for _, value in session.history("time.step")] == pytest.approx([0.01] * 3)


def test_the_report_says_how_many_steps_were_left_out() -> None:
    with one_in(EVERY) as (session, _):
        train(103)
    assert session.budget.left_out == 103 - 6
    assert session.finish(Ending())["overhead"]["steps_left_out"] == 97


# --------------------------------------------------------------------------- what a device keeps of steps that nobody watches


@pytest.fixture
def kept_by_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of a CPU, kept as the kernel keeps those of a card."""
    words = [0.0] * len(WORDS)
    original = gradients.gradient_stats

    def keep(self: gradients.GradientProbe, update: Any, step: int) -> bool:
        given = [p.grad for group in update.optimizer.param_groups for p in group["params"]]
        nonfinite = sum(float((~g.isfinite()).sum()) for g in given)
        take_up(words, step, math.hypot(*(float(g.norm()) for g in given)), nonfinite)
        self._kept.add(update.optimizer_index)
        return True

    def stats(params: Any, hold: Any = None) -> Any:
        found = original(params, hold)
        if found is not None:
            found.words = DeviceVector(torch.tensor(hand_out(words), dtype=torch.float64))
        return found

    monkeypatch.setattr(gradients.GradientProbe, "keep_unread", keep)
    monkeypatch.setattr(gradients, "gradient_stats", stats)


SPIKES = RULES + "  spike: {metric: grad_norm, when: {above: 1000.0}}\n"


def train_with(steps: int, *, factor: float, at: int) -> None:
    """Gradients that are multiplied in one single step, unseen by the loss."""
    model, optimizer = model_and_optimizer()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(factor if step == at else 1.0)
        optimizer.step()
        if step == at:  # what a spike does to the weights is another matter
            with torch.no_grad():
                for p, old in zip(model.parameters(), before, strict=True):
                    p.copy_(old)


def test_a_spike_of_a_single_step_between_two_looks_is_found_with_its_step(kept_by_a_device: None) -> None:
    with one_in(EVERY, SPIKES) as (session, _):
        train_with(90, factor=1e6, at=47)
    assert [(alert.rule, alert.fired_step) for alert in session.alerts] == [("spike", 47)]
    assert 47 in steps_of(session, "grad_norm")


def test_a_gradient_that_is_not_finite_in_a_single_step_is_found_with_its_step(kept_by_a_device: None) -> None:
    with one_in(EVERY, SPIKES) as (session, _), pytest.raises(StopTraining):
        train_with(90, factor=math.nan, at=47)
    assert ("grads-not-finite", 47) in [(alert.rule, alert.fired_step) for alert in session.alerts]


def test_a_launch_that_takes_more_than_half_of_the_budget_is_not_made(kept_by_a_device: None) -> None:
    with one_in(EVERY, SPIKES) as (session, watching):
        session.budget.affords = lambda launch_ns: False  # type: ignore[method-assign]
        train_with(90, factor=1e6, at=47)
        assert watching.machine.unwatched._keeper is None
    assert session.alerts == []


def test_what_we_do_before_gradients_are_clipped_is_our_own_time() -> None:
    session = open_session(target="t", rules=RULES, settings={"overhead_budget": "off"}, console=False, record=False)
    probe = session.board.probes["gradients"]
    look, spent = probe.look, []  # type: ignore[attr-defined]

    def slow_look(row: Any, update: Any) -> None:
        if not update.final:  # gradients are complete, and about to be clipped
            began = time.perf_counter()
            time.sleep(0.005)
            spent.append(time.perf_counter() - began)
        look(row, update)

    probe.look = slow_look  # type: ignore[attr-defined]
    session.board.reschedule()
    with InProcess(session):
        model, optimizer = model_and_optimizer()
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    session.finish(Ending())
    assert len(spent) >= 5  # the first step may be shown by events
    assert session.own_ns / 1e9 >= sum(spent)


def test_a_step_that_is_left_out_asks_nothing_of_its_optimizer_until_another_one_steps() -> None:
    with one_in(EVERY) as (session, watching):
        model, optimizer = model_and_optimizer()
        for _ in range(EVERY + 2):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        unwatched = watching.machine.unwatched
        assert unwatched.left
        assert unwatched.alone == id(optimizer)
        other = torch.optim.SGD(model.parameters(), lr=0.01)
        model(torch.randn(8, 4)).square().mean().backward()
        other.step()
        assert not unwatched.left
        for _ in range(EVERY):
            model(torch.randn(8, 4)).square().mean().backward()
            other.step()
        assert unwatched.left
        assert unwatched.alone == id(other)
    session.finish(Ending())
