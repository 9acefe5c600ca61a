"""The overhead budget: costly metrics come less often, the ones that act do not, and it is said once."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from healthcheck.assembly import open_session
from healthcheck.core.events import Event, EventKind
from healthcheck.core.samples import Metric
from healthcheck.engine.routes import RuleDemand
from healthcheck.extend.dispatch import Dispatch
from healthcheck.run import budget
from healthcheck.run.board import ProbeBoard
from healthcheck.run.budget import CHECK_EVERY, OverheadBudget, acting_metrics
from healthcheck.run.session import Session

pytestmark = pytest.mark.usefixtures("virtual_time")

PLUGIN = """
import time
from healthcheck import hookimpl
from healthcheck.core.events import EventKind
from healthcheck.core.samples import Metric, Sample


class Slow:
    name = "slow"
    listens_to = (EventKind.STEP_END,)
    provides = (Metric("slow.one", "A costly number."), Metric("slow.two", "A costly number."))
    stretchable = ("slow.one", "slow.two")

    def sample(self, event, demand):
        for metric in self.provides:
            if demand.due(metric.name, event.step):
                time.sleep(0.001)
                yield Sample(metric.name, event.step, 1.0)


@hookimpl
def healthcheck_register_probes(register):
    register(Slow())
"""


ONE = {"metric": "slow.one", "when": {"above": 5}}
TWO = {"metric": "slow.two", "when": {"above": 5}}


def run(
    plugin: Path, steps: int, *, share: Any, two: dict[str, Any], one: dict[str, Any] = ONE
) -> tuple[Session, list[str]]:
    rules = {"version": 1, "rules": {"one": one, "two": two}}
    session = open_session(
        target="t",
        rules=rules,
        settings={"overhead_budget": share},
        plugins=[str(plugin)],
        console=False,
        record=False,
    )
    said: list[str] = []
    session.add_report(SimpleNamespace(name="listener", note=said.append))  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        session.emit(Event(EventKind.STEP_END, step))
        time.sleep(0.0005)
    return session, said


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A local plugin whose two metrics cost a millisecond each time they are due."""
    path = tmp_path / "slow.py"
    path.write_text(PLUGIN)
    return path


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MIN_SECONDS", 0.0)


def test_a_run_over_its_budget_measures_less_often_and_says_so_once(plugin: Path, at_once: None) -> None:
    session, said = run(plugin, 400, share="1%", two=TWO)
    assert session.demand.stretch["slow.one"] >= 4
    assert sum("measured every" in sentence for sentence in said) == 1
    assert "more than the budget of 1.0%: slow.one, slow.two are now measured every 2 steps" in said[0]
    taken = [step for step, _ in session.history("slow.one")]
    assert len(taken) < 300
    assert session.budget.stretched["slow.one"] == session.demand.stretch["slow.one"]


def test_a_rule_that_may_stop_the_run_keeps_its_every(plugin: Path, at_once: None) -> None:
    session, _ = run(plugin, 200, share="1%", two={**TWO, "severity": "error", "then": ["stop"]})
    assert session.demand.stretch.get("slow.one", 1) > 1
    assert "slow.two" not in session.demand.stretch
    session.judge.flush(200, session.active())
    assert len(session.history("slow.two")) == 200


def test_a_budget_that_is_kept_or_off_changes_nothing(plugin: Path, at_once: None) -> None:
    for share in ("100%", "off"):
        session, said = run(plugin, 150, share=share, two=TWO)
        assert session.demand.stretch == {}
        assert said == []


def test_a_run_that_cannot_be_kept_within_its_budget_says_that_once(plugin: Path, at_once: None) -> None:
    acting = {"severity": "error", "then": ["stop"]}
    rules = {name: {"metric": f"slow.{name}", "when": {"above": 5}, **acting} for name in ("one", "two")}
    session, said = run(plugin, 300, share="1%", two=rules["two"], one=rules["one"])
    assert session.demand.stretch == {}
    assert len(said) == 1
    assert "no more of it can be measured less often" in said[0]


def test_a_short_run_is_left_alone(plugin: Path) -> None:
    session, said = run(plugin, 150, share="1%", two=TWO)
    assert session.demand.stretch == {}
    assert said == []


# --------------------------------------------------------------------------- the part on its own


class Costly:
    """A probe whose two metrics may both be measured less often."""

    name = "costly"
    listens_to = (EventKind.STEP_END,)
    provides = (Metric("a", "A number."), Metric("b", "Another."))
    stretchable = ("a", "b")

    def sample(self, event: Event, demand: Any) -> Any:
        return ()


def costly(share: float | None, *, keep: tuple[str, ...] = ()) -> tuple[OverheadBudget, RuleDemand, list[str]]:
    """A budget over a board with one probe that costs all the time that is ours, and what it says."""
    demand, said = RuleDemand(), list[str]()
    demand.every.update(a=1, b=2)
    board = ProbeBoard({"costly": Costly()}, demand, Dispatch())
    board.cost["costly"].ns = 10**9
    return OverheadBudget(share, demand=demand, board=board, keep=keep, note=said.append), demand, said


def test_each_look_over_the_budget_halves_how_often_the_costliest_is_measured() -> None:
    budget, demand, said = costly(0.01)
    for look in (1, 2, 3):
        budget.look(look * 10**9, 30.0 * look)
    assert demand.stretch == {"a": 4, "b": 4}  # the first look only takes the start-up costs out of the account
    assert budget.stretched == {"a": 4, "b": 8}
    assert len(said) == 1
    assert budget.steps_to_look == CHECK_EVERY


def test_what_must_be_kept_is_never_stretched_and_then_the_budget_says_that_it_cannot_be_kept() -> None:
    budget, demand, said = costly(0.01, keep=("a", "b"))
    for look in (1, 2, 3):
        budget.look(look * 10**9, 30.0 * look)
    assert demand.stretch == {}
    assert len(said) == 1
    assert "no more of it can be measured less often" in said[0]


def test_a_cost_within_the_budget_or_no_budget_changes_nothing() -> None:
    for share in (0.5, None):
        budget, demand, said = costly(share)
        for look in (1, 2, 3):
            budget.look(look * 10**9, 30.0 * look)
        assert (demand.stretch, said) == ({}, [])


def test_metrics_of_rules_that_act_or_fail_the_run_are_kept(watched: Any) -> None:
    run = watched("""
        external: [a, b, c, d]
        rules:
          stops: {metric: a, when: {above: 1}, then: [stop]}
          skips: {metric: b, when: {above: 1}, then: [skip_update]}
          fails: {metric: c, when: {above: 1}, severity: error}
          warns: {metric: d, when: {above: 1}}
    """)
    assert acting_metrics(run.session.rules.rules) == {"a", "b", "c"}
