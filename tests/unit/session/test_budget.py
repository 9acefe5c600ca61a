"""The overhead budget: costly metrics come less often, the ones that act do not, and it is said once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from healthcheck import budget, hookimpl
from healthcheck.assembly import open_session
from healthcheck.events import Event, EventKind
from healthcheck.samples import Metric, Sample
from healthcheck.session import Session


class Slow:
    """Two metrics that cost a millisecond each time they are due."""

    name = "slow"
    listens_to = (EventKind.STEP_END,)
    provides = (Metric("slow.one", "A costly number."), Metric("slow.two", "A costly number."))
    stretchable = ("slow.one", "slow.two")

    def sample(self, event: Event, demand: Any) -> Iterable[Sample]:
        for metric in self.provides:
            if demand.due(metric.name, event.step):
                time.sleep(0.001)
                yield Sample(metric.name, event.step, 1.0)


class Plugin:
    @staticmethod
    @hookimpl
    def healthcheck_register_probes(register: Callable[[Any], None]) -> None:
        register(Slow())


def run(steps: int, *, share: Any, two: dict[str, Any]) -> tuple[Session, list[str]]:
    rules = {"version": 1, "rules": {"one": {"metric": "slow.one", "when": {"above": 5}}, "two": two}}
    session = open_session(
        target="t",
        rules=rules,
        settings={"overhead_budget": share},
        plugin_objects=[Plugin],
        console=False,
        record=False,
    )
    said: list[str] = []
    session.note = said.append  # type: ignore[method-assign]
    for step in range(1, steps + 1):
        session.emit(Event(EventKind.STEP_END, step))
        time.sleep(0.0005)
    return session, said


TWO = {"metric": "slow.two", "when": {"above": 5}}


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MIN_SECONDS", 0.0)


def test_a_run_over_its_budget_measures_less_often_and_says_so_once(at_once: None) -> None:
    session, said = run(400, share="1%", two=TWO)
    assert session.demand.stretch["slow.one"] >= 4
    assert len(said) == 1
    assert "more than the budget of 1.0%: slow.one, slow.two are now measured every 2 steps" in said[0]
    taken = [step for step, _ in session.history("slow.one")]
    assert len(taken) < 300
    assert session.budget.stretched["slow.one"] == session.demand.stretch["slow.one"]


def test_a_rule_that_may_stop_the_run_keeps_its_every(at_once: None) -> None:
    session, _ = run(200, share="1%", two={**TWO, "severity": "error", "then": ["stop"]})
    assert session.demand.stretch.get("slow.one", 1) > 1
    assert "slow.two" not in session.demand.stretch
    assert len(session.history("slow.two")) == 200


def test_a_budget_that_is_kept_or_off_changes_nothing(at_once: None) -> None:
    for share in ("100%", "off"):
        session, said = run(150, share=share, two=TWO)
        assert session.demand.stretch == {}
        assert said == []


def test_a_short_run_is_left_alone() -> None:
    session, said = run(150, share="1%", two=TWO)
    assert session.demand.stretch == {}
    assert said == []
