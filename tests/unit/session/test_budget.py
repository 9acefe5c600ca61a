"""The overhead budget: costly metrics come less often, then whole steps; those of rules that act do not; it is said once."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from healthcheck.assembly import open_session
from healthcheck.core.events import Event, EventKind
from healthcheck.core.samples import Metric
from healthcheck.engine.lookups import RuleDemand
from healthcheck.extend.dispatch import Dispatch
from healthcheck.run import budget
from healthcheck.run.board import ProbeBoard
from healthcheck.run.budget import (
    ALLOWANCE,
    FIRST_DISPLACED,
    MOST_DISPLACED,
    START_STEPS,
    TRIAL,
    OverheadBudget,
    acting_metrics,
    displacement,
    one_in,
)
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
    """The allowance is a tenth of a second: a hundred looks of the plugin."""
    monkeypatch.setattr(budget, "ALLOWANCE", 0.1)


def test_a_run_over_its_budget_measures_less_often_and_says_nothing_meanwhile(plugin: Path, at_once: None) -> None:
    session, said = run(plugin, 600, share="1%", two=TWO)
    assert session.demand.stretch["slow.one"] >= 4
    taken = [step for step, _ in session.history("slow.one")]
    assert taken[:40] == list(range(taken[0], taken[0] + 40))  # the allowance: everything is watched
    assert taken[-1] - taken[-2] == session.budget.stretched["slow.one"] == session.demand.stretch["slow.one"]
    assert said == []


def test_a_rule_that_may_stop_the_run_keeps_its_every(plugin: Path, at_once: None) -> None:
    session, _ = run(plugin, 200, share="1%", two={**TWO, "severity": "error", "then": ["stop"]})
    assert session.demand.stretch.get("slow.one", 1) > 1
    assert "slow.two" not in session.demand.stretch
    session.judge.flush(200, session.active())
    assert len(session.history("slow.two", 500)) == 200


def test_a_budget_that_is_kept_or_off_changes_nothing(plugin: Path, at_once: None) -> None:
    for share in ("100%", "off"):
        session, said = run(plugin, 150, share=share, two=TWO)
        assert session.demand.stretch == {}
        assert said == []


def test_a_run_within_the_allowance_is_seen_whole(plugin: Path) -> None:
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


class Training:
    """Steps of one length, of which some are watched, on a clock of their own.

    :param step: seconds of a step without us.
    :param costs: seconds that a watched step takes us.
    :param displaces: seconds that it takes the training besides.
    :param idle: seconds that a step takes us which is left out.
    """

    def __init__(
        self,
        share: float | None,
        *,
        step: float,
        costs: float,
        displaces: float = 0.0,
        idle: float = 0.0,
        keep: tuple[str, ...] = ("a", "b"),
        whole: bool = False,
    ) -> None:
        demand = RuleDemand()
        demand.every.update(a=1, b=2)
        self.demand, self.board = demand, ProbeBoard({"costly": Costly()}, demand, Dispatch())
        self.budget = OverheadBudget(share, demand=demand, board=self.board, keep=keep)
        self.budget.whole = whole
        self.length, self.costs, self.displaces, self.idle = step, costs, displaces, idle
        self.number, self.own, self.active, self.lost = 0, 0.0, 0.0, 0.0
        self.watched = list[int]()

    def run(self, steps: int) -> Training:
        last = self.number + steps
        while self.number < last:
            self.number += 1
            self.watched.append(self.number)
            costs = self.costs / self.demand.stretch.get("a", 1)
            self.own += costs
            self.lost += costs + self.displaces
            self.active += self.length + costs + self.displaces
            self.board.cost["costly"].ns += int(costs * 1e9)
            left = self.budget.step_over(self.number, int(self.own * 1e9), self.active)
            if left:
                self.number += left
                self.own += left * self.idle
                self.lost += left * self.idle
                self.active += left * (self.length + self.idle)
                self.budget.gap_over(left, int(self.own * 1e9), self.active, step=self.number)
        return self

    def gaps(self) -> list[int]:
        return [after - before for before, after in itertools.pairwise(self.watched)]


@pytest.mark.parametrize(
    ("step", "costs"), [(0.00025, 0.0006), (0.0006, 0.0006), (0.004, 0.002), (0.015, 0.0011), (0.1, 0.0011), (1.0, 0.5)]
)
def test_the_whole_run_costs_the_allowance_and_the_budget_at_most(step: float, costs: float) -> None:
    training = Training(0.01, step=step, costs=costs)
    for _ in range(5):
        training.run(20_000)
        # One step too much may be on the account: its cost is known only afterwards.
        assert training.own <= ALLOWANCE + 0.01 * training.active + 2 * costs


def test_up_to_the_allowance_every_step_is_watched_and_from_there_on_the_budget_holds_at_once() -> None:
    training = Training(0.01, step=0.001, costs=0.001).run(30_000)
    gaps = training.gaps()
    first = next(place for place, gap in enumerate(gaps) if gap > 1)
    assert first + 1 == pytest.approx(START_STEPS + ALLOWANCE / FIRST_DISPLACED / 0.001, abs=2)
    assert min(gaps[first + 1 :]) >= 50
    assert set(gaps[first + 20 :]) <= {100, 200}


def test_ranks_watch_two_steps_in_so_many_once_they_have_agreed_on_it() -> None:
    training = Training(0.01, step=0.01, costs=0.001)
    training.budget.shared = True
    training.run(3000)
    assert training.watched == list(range(1, 3001))  # they have not
    assert training.budget.wanted == 20
    training.budget.agreed(20)
    assert training.budget.wanted == 20
    training.run(1000)
    assert training.watched[3000:] == [step for step in range(3001, 4001) if step == 3001 or step % 20 in (19, 0)]
    assert [step for step in range(4000, 4060) if training.budget.in_turn(step)] == [4000, 4019, 4020, 4039, 4040, 4059]


def test_a_rank_whose_own_account_is_full_leaves_out_what_the_others_do() -> None:
    training = Training(0.01, step=1.0, costs=0.001).run(10)
    training.budget.shared = True
    training.budget.agreed(5)
    training.run(20)
    assert training.watched[11:] == [14, 15, 19, 20, 24, 25, 29, 30]
    assert training.budget.wanted == 1  # if it were the one that speaks


def test_what_the_start_costs_is_not_charged_to_the_steps_that_follow() -> None:
    """Kernels that are compiled in the first step may take longer than the whole allowance."""
    training = Training(0.01, step=0.04, costs=0.0001)
    training.own = 4.0
    assert len(training.run(5000).watched) == 5000


def test_watched_steps_are_those_at_which_rules_look_anyhow() -> None:
    training = Training(0.01, step=0.001, costs=0.0011).run(100_000)
    later = training.watched[int(ALLOWANCE / FIRST_DISPLACED / 0.0011) + START_STEPS + 5 :]
    assert later
    assert all(step % 100 == 0 for step in later)
    assert [one_in(least) for least in (0.1, 1.0, 1.1, 3, 7, 11, 199, 10**9)] == [1, 1, 2, 5, 10, 20, 200, 10_000]


def test_a_loop_whose_steps_get_longer_is_watched_more_often() -> None:
    training = Training(0.01, step=0.001, costs=0.001).run(20_000)
    training.length = 0.2
    training.run(3000)
    assert training.budget.every == 1
    assert len(training.gaps()) > 2000


def test_a_step_that_is_left_out_counts_too_and_there_is_an_end_to_what_is_left_out() -> None:
    training = Training(0.01, step=0.0002, costs=0.001, idle=0.000003).run(100_000)
    assert max(training.gaps()) <= 10_000
    assert training.watched[-1] > 80_000


def test_what_watching_displaces_counts_as_well() -> None:
    """Its own time is within the budget; what it does to the caches is not."""
    alone = Training(0.01, step=0.1, costs=0.0009).run(20_000)
    assert alone.budget.displaced == pytest.approx(1.0)
    assert alone.budget.left_out <= 4 * TRIAL
    training = Training(0.01, step=0.1, costs=0.0009, displaces=0.0009).run(20_000)
    assert training.budget.displaced == pytest.approx(2.0)
    assert training.lost <= ALLOWANCE * 2 + 0.01 * training.active + 2.5  # what was lost before it was known
    assert training.budget.every == 2


def test_a_trial_leaves_out_single_steps_far_apart() -> None:
    training = Training(0.01, step=0.1, costs=0.0005).run(8000)
    out = [before + 1 for before, gap in zip(training.watched, training.gaps(), strict=False) if gap > 1]
    assert len(out) == training.budget.left_out == TRIAL
    assert set(training.gaps()) == {1, 2}
    assert min(after - before for before, after in itertools.pairwise(out)) >= 4


def test_the_costliest_are_looked_at_less_often_before_whole_steps_are_left_out() -> None:
    training = Training(0.01, step=0.1, costs=0.004, keep=()).run(20_000)
    assert training.demand.stretch == {"a": 4, "b": 4}
    assert training.budget.stretched == {"a": 4, "b": 8}
    assert max(training.gaps()[int(ALLOWANCE / 0.004) + 100 :]) <= 2  # trials
    assert Training(0.01, step=0.1, costs=0.004, keep=("a", "b")).run(20_000).budget.every == 5


def test_where_no_step_may_be_left_out_the_costliest_are_still_looked_at_less_often() -> None:
    training = Training(0.01, step=0.01, costs=0.004, keep=(), whole=True).run(5000)
    assert training.demand.stretch["a"] >= 32
    assert training.budget.left_out == 0


def test_no_budget_leaves_nothing_out() -> None:
    training = Training(None, step=0.001, costs=0.001).run(10_000)
    assert len(training.watched) == 10_000
    assert training.demand.stretch == {}


def test_it_says_what_was_left_out_where_steps_take_five_milliseconds_or_more() -> None:
    long = Training(0.01, step=0.02, costs=0.004).run(5000)
    said = long.budget.sentence(long.number, long.active)
    assert "within the budget of 1.0% of the training time" in said
    assert f"{long.number - long.budget.left_out:,} of {long.number:,} steps were watched" in said
    assert "overhead_budget: off" in said
    short = Training(0.01, step=0.001, costs=0.001).run(50_000)
    assert short.budget.left_out
    assert short.budget.sentence(short.number, short.active) == ""
    healthy = Training(0.01, step=0.1, costs=0.0005).run(9000)  # but for a trial
    assert healthy.budget.sentence(healthy.number, healthy.active) == ""


def test_a_disturbed_trial_is_no_displacement() -> None:
    rng = random.Random(0)
    assert displacement([(rng.gauss(0.001, 0.02), 0.001) for _ in range(TRIAL)]) == 1.0
    assert displacement([(rng.gauss(0.003, 0.0002), 0.001) for _ in range(TRIAL)]) == pytest.approx(3.0, rel=0.1)
    assert displacement([(1.0, 0.001)] * TRIAL) == MOST_DISPLACED


def test_on_a_busy_machine_the_allowance_is_what_we_really_ran() -> None:
    """Half of the time was spent waiting for a processor: 2.9 seconds by the clock are 1.4 of ours, which cost two."""
    training = Training(0.01, step=0.01, costs=0.001)
    budget = training.budget
    for step in range(1, START_STEPS + 1):
        assert budget.step_over(step, 0, 0.0) == 0
    assert budget.put_off(1_100_000_000, 0.5)
    assert budget.step_over(1100, budget.binds_at - 1, 20.0) == 0
    left = ALLOWANCE / 2 / FIRST_DISPLACED - 0.55  # of half of the allowance: 550 ms were ours
    assert budget.binds_at == pytest.approx(1.1e9 + left * 1e9, rel=0.01)
    assert not budget.put_off(2_000_000_000, 0.5)
    assert budget.step_over(2000, 2_000_000_000, 40.0) == 0  # from here on is known what steps cost
    used_up = int(2 * ALLOWANCE / FIRST_DISPLACED * 1e9)
    assert budget.put_off(used_up - 200_000_000, 0.5)
    assert not budget.put_off(used_up + 2, 0.5)
    budget.step_over(4000, used_up, 80.0)
    assert budget.binds
    assert budget.credit(80.0) == pytest.approx(0.8)


def test_metrics_of_rules_that_act_or_fail_the_run_are_kept(watched: Any) -> None:
    run = watched("""
        external: [a, b, c, d]
        rules:
          stops: {metric: a, when: {above: 1}, then: [stop]}
          skips: {metric: b, when: {above: 1}, then: [skip_update]}
          fails: {metric: c, when: {above: 1}, severity: error}
          warns: {metric: d, when: {above: 1}}
    """)
    assert acting_metrics(run.session.rules.causes) == {"a", "b", "c"}
