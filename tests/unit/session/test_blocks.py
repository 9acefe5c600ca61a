"""A whole session whose short steps are judged together: nothing is lost, nothing is late that must not be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from healthcheck.core.events import Event, EventKind
from healthcheck.core.samples import Sample
from healthcheck.run.ending import Ending

RULES = """
    external: [kl]
    rules:
      kl-high: {metric: kl, when: {above: 5}, then: [stop]}
      loss-high: {metric: loss, when: {above: 5}}
      loss-mean: {metric: loss, when: {mean: {above: 100, window: 400}}}
"""


@pytest.fixture
def later(watched: Callable[..., Any]) -> Callable[..., tuple[Any, int]]:
    """A run that has long left its start, and its next step."""

    def make(rules: str = RULES, **options: Any) -> tuple[Any, int]:
        run = watched(rules, **options)
        for step in range(1, 301):
            run.step(step, kl=0.0)
        run.session.judge.flush(300, run.session.active())
        run.session.judge.block_over(300, run.session.active())
        return run, 301

    return make


def test_a_stop_comes_with_its_block_and_says_how_late_it_was(later: Callable[..., tuple[Any, int]]) -> None:
    run, step = later()
    run.step(step, kl=9.0)
    for following in range(step + 1, step + 31):
        run.step(following, kl=0.0)
    assert run.controls.asked == []
    run.step(step + 31, kl=0.0)
    assert run.controls.asked == [f"stop by kl-high at {step + 31}"]
    (alert,) = run.session.alerts
    assert (alert.fired_step, alert.detected_step) == (step, step + 31)


def test_what_comes_behind_a_stop_is_recorded_as_such(later: Callable[..., tuple[Any, int]]) -> None:
    run, step = later()
    run.step(step, kl=9.0)
    run.step(step + 1, loss=9.0, kl=0.0)
    report = run.session.finish(Ending(script_exit_code=0))
    assert [(a["rule"], a["fired_step"], a["facts"].get("after_stop")) for a in report["alerts"]] == [
        ("kl-high", step, None),
        ("loss-high", step + 1, step),
    ]


def test_the_state_of_a_run_holds_what_waits(later: Callable[..., tuple[Any, int]]) -> None:
    run, step = later()
    for following in range(step, step + 7):
        run.step(following, kl=0.0)
    saved = run.session.state_dict()
    (series,) = saved["engine"]["causes"]["loss-mean"]["series"]
    assert (saved["engine"]["step"], series["n"]) == (step + 6, step + 6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logged_number_that_is_not_finite_is_judged_in_its_step(
    later: Callable[..., tuple[Any, int]], value: float
) -> None:
    run, step = later()
    run.step(step, kl=value)
    (alert,) = run.session.alerts
    assert (alert.rule, alert.fired_step, alert.detected_step) == ("kl-high", step, step)


def test_a_loss_that_is_not_finite_stops_before_its_update(later: Callable[..., tuple[Any, int]]) -> None:
    run, step = later("rules: {loss-not-finite: {metric: loss, when: nonfinite, then: [stop]}}")
    run.session.emit(Event(EventKind.LOSS, step, loss=float("nan")))
    run.session.emit(Event(EventKind.BEFORE_UPDATE, step))
    assert run.controls.asked[-1] == f"stop by loss-not-finite at {step}"


def test_a_rule_that_skips_updates_and_has_no_bound_is_judged_before_each(
    later: Callable[..., tuple[Any, int]],
) -> None:
    run, step = later("external: [kl]\nrules: {kl-high: {metric: kl, when: {above: 5}, for: 2, then: [skip_update]}}")
    run.step(step, kl=9.0)
    assert run.controls.asked == []
    run.session.log({"kl": 9.0}, step=step + 1)
    run.session.emit(Event(EventKind.BEFORE_UPDATE, step + 1))
    assert run.controls.asked == ["skip"]


def test_samples_and_alerts_are_heard_in_the_order_of_their_steps(later: Callable[..., tuple[Any, int]]) -> None:
    run, step = later()
    heard: list[int] = []

    class Listener:
        name = "listener"

        def samples(self, at: int, samples: Sequence[Sample]) -> None:
            heard.append(at)

    run.session.add_report(Listener())
    for following in range(step, step + 40):
        run.step(following, kl=0.0)
    run.session.finish(Ending())
    assert heard == list(range(step, step + 40))


def test_silence_does_not_count_while_samples_wait(watched: Callable[..., Any]) -> None:
    run = watched("external: [kl]\nrules: {quiet: {metric: kl, when: {stale: {after: 3s, first: 3s}}}}")
    session = run.session
    for step in range(1, 301):
        session.clock.advance(0.001)
        run.step(step, kl=0.0)
    session.judge.block_over(300, session.active())
    session.clock.advance(0.01)
    run.step(301, kl=0.0)
    # Training goes on: the training thread looks itself, behind what waits.
    session.judge.silence(0.5, session.active() + 0.5)
    assert session.alerts == []
    # It hangs: what waits is judged first, and only then is it silent.
    session.judge.silence(2.9, session.active() + 2.9)
    assert (session.alerts, session.engine.step) == ([], 301)
    session.judge.silence(3.1, session.active() + 3.1)
    assert [alert.rule for alert in session.alerts] == ["quiet"]
