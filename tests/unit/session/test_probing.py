"""The board of probes on its own: who is called at which event of which step, and what becomes of an error."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from healthcheck.assembly import plugin_host
from healthcheck.core.events import Event, EventKind
from healthcheck.core.rows import StepRow
from healthcheck.core.samples import Metric, Sample
from healthcheck.engine.lookups import RuleDemand
from healthcheck.extend.dispatch import Dispatch
from healthcheck.rulelang.compile import load_rules
from healthcheck.rulelang.rule import SETTLED
from healthcheck.run.board import TIMED_EVERY, TIMED_FIRST, ProbeBoard

STEP = (EventKind.LOSS, EventKind.BEFORE_UPDATE, EventKind.STEP_END)


class Listening:
    """A probe that notes when it is called, and answers at the update."""

    name = "listening"
    listens_to = STEP
    provides = (Metric("a", "A number."), Metric("b", "Another."))

    def __init__(self, **declared: Any) -> None:
        self.calls: list[tuple[int, str]] = []
        for name, value in declared.items():
            setattr(self, name, value)

    def sample(self, event: Event, demand: Any) -> Any:
        self.calls.append((event.step, event.kind.value))
        return [Sample("a", event.step, 1.0)] if event.kind is EventKind.BEFORE_UPDATE else ()


def board(probe: Listening, **every: int) -> ProbeBoard:
    demand = RuleDemand()
    demand.every.update(every)
    return ProbeBoard({probe.name: probe}, demand, Dispatch())


def run(board: ProbeBoard, steps: int, **facts: Any) -> None:
    for step in range(1, steps + 1):
        for kind in STEP:
            board.sample(Event(kind, step, **facts), float(step), [])


def called(probe: Listening, kind: EventKind) -> list[int]:
    return [step for step, name in probe.calls if name == kind.value]


def test_at_events_that_it_names_a_probe_is_called_only_in_steps_in_which_a_metric_is_due() -> None:
    probe = Listening(only_when_due=(EventKind.LOSS,))
    watching = board(probe, a=4, b=6)
    run(watching, 12)
    assert called(probe, EventKind.LOSS) == [4, 6, 8, 12]
    assert called(probe, EventKind.STEP_END) == list(range(1, 13))
    assert watching.looks_at(EventKind.LOSS, 16)
    assert not watching.looks_at(EventKind.LOSS, 17)


def test_a_step_ahead_counts_too_and_a_metric_of_every_step_is_always_due() -> None:
    ahead, always = Listening(only_when_due=STEP, steps_ahead=1), Listening(only_when_due=STEP)
    run(board(ahead, a=5), 11)
    run(board(always, a=1, b=5), 3)
    assert called(ahead, EventKind.LOSS) == [4, 5, 9, 10]
    assert called(always, EventKind.LOSS) == [1, 2, 3]


def test_a_stretched_metric_is_due_less_often_once_the_board_plans_anew() -> None:
    probe, demand = Listening(only_when_due=STEP), RuleDemand()
    demand.every["a"] = 2
    watching = ProbeBoard({probe.name: probe}, demand, Dispatch())
    demand.stretch["a"] = 3
    watching.reschedule()
    run(watching, 12)
    assert called(probe, EventKind.LOSS) == [6, 12]


def test_a_metric_with_a_later_pace_is_due_less_often_once_the_run_has_settled() -> None:
    text = "version: 1\nrules:\n  high: {metric: loss, when: {above: 5}, every: '10, then 50'}\n"
    probe = Listening(only_when_due=STEP, provides=(Metric("loss", "A number."),))
    demand = RuleDemand.of(load_rules([text], registry=plugin_host().registry).causes)
    watching = ProbeBoard({probe.name: probe}, demand, Dispatch())
    run(watching, SETTLED + 200)
    at_first, later = range(10, SETTLED, 10), range(SETTLED, SETTLED + 201, 50)
    assert called(probe, EventKind.LOSS) == [*at_first, *later]


def test_of_two_rules_on_a_metric_the_one_that_looks_more_often_decides_before_and_after() -> None:
    text = (
        "version: 1\nrules:\n  one: {metric: loss, when: {above: 5}, every: '10, then 100'}\n"
        "  other: {metric: loss, when: {below: 5}, every: 20}\n"
    )
    demand = RuleDemand.of(load_rules([text], registry=plugin_host().registry).causes)
    assert demand.every_of("loss") == 10
    assert demand.settle()
    assert demand.every_of("loss") == 20


def test_a_probe_that_has_answered_is_not_called_again_in_that_step_for_that_optimizer() -> None:
    probe = Listening(answers_once=(EventKind.STEP_END,))
    watching = board(probe, a=1)
    run(watching, 2)
    assert called(probe, EventKind.STEP_END) == []
    watching.sample(Event(EventKind.STEP_END, 2, optimizer_index=1), 2.0, [])
    assert called(probe, EventKind.STEP_END) == [2]


def test_a_probe_of_one_fact_is_not_called_without_it() -> None:
    probe = Listening(only_with="max_norm")
    watching = board(probe, a=1)
    run(watching, 2)
    assert probe.calls == []
    run(watching, 1, max_norm=1.0)
    assert len(probe.calls) == 3


def test_calls_and_time_of_a_probe_are_extrapolated_from_the_steps_that_are_timed() -> None:
    probe = Listening()
    watching = board(probe, a=1)
    steps = TIMED_FIRST + 10 * TIMED_EVERY
    run(watching, steps)
    cost = watching.cost[probe.name]
    assert cost.calls == pytest.approx(len(probe.calls), abs=len(STEP) * TIMED_EVERY)
    assert cost.ns > 0


def pausing(step: int, until: int) -> Any:
    """A probe that has nothing to do from one step to another."""
    probe = Listening(rests_until=0)
    look = probe.sample

    def sample(event: Event, demand: Any) -> Any:
        if event.step == step:
            probe.rests_until = until
        return look(event, demand)

    probe.sample = sample  # type: ignore[method-assign]
    return probe


class Optimizer:
    """Something with an identity that a weak reference can follow."""


def test_a_probe_that_pauses_is_called_again_at_the_step_that_it_named() -> None:
    probe = pausing(3, until=7)
    run(board(probe, a=1), 8, optimizer=Optimizer())
    assert called(probe, EventKind.STEP_END) == [1, 2, 3, 7, 8]


def test_an_event_that_only_pausing_probes_would_see_is_not_wanted() -> None:
    probe = pausing(3, until=7)
    watching = board(probe, a=1)
    run(watching, 3, optimizer=Optimizer())
    assert not watching.looks_at(EventKind.LOSS, 4)
    assert watching.looks_at(EventKind.LOSS, 7)


def test_a_new_optimizer_ends_every_pause() -> None:
    probe = pausing(3, until=100)
    watching = board(probe, a=1)
    run(watching, 4, optimizer=Optimizer())
    watching.sample(Event(EventKind.BEFORE_UPDATE, 5, optimizer=Optimizer()), 5.0, [])
    assert called(probe, EventKind.BEFORE_UPDATE) == [1, 2, 3, 5]


def turns(says: Any, steps: int, **declared: Any) -> tuple[Any, list[tuple[int, int]], list[int]]:
    """Two optimizers take turns; ``says`` gives what a probe says of its rest at the update of one in a step, None: nothing.

    Returns the updates that it was shown, and the steps in which an event of no optimizer was worth building for it.
    """
    probe, shown, wanted = Listening(rests_until=0, **declared), list[tuple[int, int]](), list[int]()

    def sample(event: Event, demand: Any) -> Any:
        if event.optimizer is not None:
            shown.append((event.step, event.optimizer_index))
            said = says(event.step, event.optimizer_index)
            if said is not None:
                probe.rests_until = said
        return ()

    probe.sample = sample  # type: ignore[method-assign]
    watching, both = board(probe, a=1), (Optimizer(), Optimizer())
    for step in range(1, steps + 1):
        watching.begin_step(step)
        if EventKind.LOSS in watching.wanted:
            wanted.append(step)
        for index, optimizer in enumerate(both):
            watching.sample(Event(EventKind.BEFORE_UPDATE, step, optimizer=optimizer, optimizer_index=index), 0.0, [])
    return probe, shown, wanted


def test_of_several_optimizers_a_probe_rests_for_the_one_of_which_it_said_so() -> None:
    _, shown, wanted = turns(lambda step, index: 5 if (step, index) == (2, 1) else None, 6)
    assert shown == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (4, 0), (5, 0), (5, 1), (6, 0), (6, 1)]
    assert wanted == [1, 2, 3, 4, 5, 6]


def test_once_it_rests_for_all_of_them_events_of_no_optimizer_are_spared_as_well() -> None:
    _, shown, wanted = turns(lambda step, index: 4 + index if step == 2 else None, 6)
    assert shown == [(1, 0), (1, 1), (2, 0), (2, 1), (4, 0), (5, 0), (5, 1), (6, 0), (6, 1)]
    assert wanted == [1, 2, 4, 5, 6]


def test_a_rest_said_of_another_optimizer_is_none_for_one_of_which_nothing_is_said() -> None:
    _, shown, _ = turns(lambda step, index: 100 if not index else None, 3)
    assert shown == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 1)]


def test_a_probe_that_looks_at_one_of_them_for_all_rests_for_all() -> None:
    _, shown, wanted = turns(lambda step, index: 4 if step == 2 and not index else None, 5, rests_for_all=True)
    assert shown == [(1, 0), (1, 1), (2, 0), (2, 1), (4, 0), (4, 1), (5, 0), (5, 1)]
    assert wanted == [1, 2, 4, 5]


def train_with_a_second(probe: Listening, since: int) -> None:
    """Four steps of an optimizer, and from step ``since`` on of a second one."""
    watching, one, two = board(probe, a=1), Optimizer(), Optimizer()
    for step in range(1, 5):
        watching.begin_step(step)
        watching.sample(Event(EventKind.BEFORE_UPDATE, step, optimizer=one), float(step), [])
        if step >= since:
            watching.sample(Event(EventKind.BEFORE_UPDATE, step, optimizer=two, optimizer_index=1), float(step), [])


def test_a_second_optimizer_ends_a_rest_for_all_that_was_said_of_the_first() -> None:
    probe = pausing(1, until=50)
    probe.rests_for_all = True
    train_with_a_second(probe, since=3)
    assert called(probe, EventKind.BEFORE_UPDATE) == [1, 3, 4, 4]


def test_who_is_done_for_good_is_not_woken_by_a_second_optimizer_for_longer_than_its_step() -> None:
    probe = pausing(1, until=sys.maxsize)
    probe.rests_for_all = True
    train_with_a_second(probe, since=1)
    assert called(probe, EventKind.BEFORE_UPDATE) == [1, 1]


def test_a_probe_that_is_never_shown_an_optimizer_rests_also_where_several_take_turns() -> None:
    probe = pausing(3, until=6)
    probe.listens_to = (EventKind.LOSS, EventKind.STEP_END)  # type: ignore[assignment]
    watching, both = board(probe, a=1), (Optimizer(), Optimizer())
    for step in range(1, 8):
        watching.begin_step(step)
        for index, optimizer in enumerate(both):
            watching.sample(Event(EventKind.LOSS, step), 0.0, [])
            watching.sample(Event(EventKind.STEP_END, step, optimizer=optimizer, optimizer_index=index), 0.0, [])
    assert called(probe, EventKind.LOSS) == [1, 1, 2, 2, 3, 3, 6, 6, 7, 7]


@pytest.mark.parametrize("closely", [False, True])
def test_in_steps_that_are_noted_in_rows_a_probe_rests_for_each_of_several_optimizers_as_well(closely: bool) -> None:
    """Unless something happens in the step: then it looks at all of them."""
    probe, shown = Reading(events_from=0), list[tuple[int, int]]()

    def sample(event: Event, demand: Any) -> Any:
        shown.append((event.step, event.optimizer_index))
        probe.events_from = 4 + event.optimizer_index
        return ()

    probe.sample = sample  # type: ignore[method-assign]
    watching, both = board(probe, a=1), (Optimizer(), Optimizer())
    watching.meet(both[0], 0)
    watching.meet(both[1], 1)
    for step in range(1, 6):
        watching.begin_step(step, rows=True)
        if closely and step == 3:
            watching.look_closely()
        for index, optimizer in enumerate(both):
            watching.sample(Event(EventKind.BEFORE_UPDATE, step, optimizer=optimizer, optimizer_index=index), 0.0, [])
    happened = [(3, 0), (3, 1)] if closely else []
    assert shown == [(1, 0), (1, 1), *happened, (4, 0), (5, 0), (5, 1)]


def test_a_probe_says_from_which_step_on_it_looks_at_updates() -> None:
    probe, looked = Reading(looks_from=0), list[int]()

    def look(row: StepRow, update: Any) -> None:
        looked.append(row.step)
        probe.looks_from = 30 if row.step == 4 else 0

    probe.look = look  # type: ignore[attr-defined]
    watching = board(probe, a=5)
    for step in range(1, 40):
        watching.begin_step(step, rows=True)
        for _, see in watching.looks:
            see(StepRow(step), None)  # type: ignore[arg-type]
    assert looked == [1, 2, 3, 4, *range(30, 40)]
    probe.looks_from = 1000
    watching.meet(Optimizer(), 0)
    watching.begin_step(40, rows=True)
    assert watching.looks, "a new optimizer ends a rest"


def test_a_probe_that_finds_nothing_to_do_when_training_begins_is_shown_nothing_else() -> None:
    probe = Listening(idle=True, listens_to=(EventKind.TRAIN_START, *STEP))
    watching = board(probe, a=1)
    watching.sample(Event(EventKind.TRAIN_START, 1), 0.0, [])
    run(watching, 2)
    assert called(probe, EventKind.TRAIN_START) == [1]
    assert len(probe.calls) == 1
    probe.idle = False  # type: ignore[attr-defined]
    watching.sample(Event(EventKind.TRAIN_START, 1), 0.0, [])
    run(watching, 2)
    assert called(probe, EventKind.LOSS) == [1, 2]


def test_a_probe_whose_rest_cannot_be_written_is_an_error_of_its_own() -> None:
    class Fixed(Listening):
        rests_until = property(lambda self: 0)

    watching, both = board(Fixed(), a=1), (Optimizer(), Optimizer())
    for step in range(1, 4):
        for index, optimizer in enumerate(both):
            watching.sample(Event(EventKind.BEFORE_UPDATE, step, optimizer=optimizer, optimizer_index=index), 0.0, [])
    assert watching._dispatch.errors


def test_the_kinds_worth_building_are_those_at_which_somebody_is_called_or_listens() -> None:
    probe = Listening(only_when_due=(EventKind.LOSS,))
    watching = board(probe, a=2)
    wanted = watching.wanted
    watching.heard_elsewhere(frozenset({EventKind.EPOCH_END}))
    watching.begin_step(1)
    assert wanted == {EventKind.BEFORE_UPDATE, EventKind.STEP_END, EventKind.EPOCH_END}
    watching.begin_step(2)
    assert wanted == {*STEP, EventKind.EPOCH_END}


def test_an_event_after_the_update_is_not_worth_building_once_all_have_answered_before_it() -> None:
    probe = Listening(
        listens_to=(EventKind.BEFORE_UPDATE, EventKind.AFTER_UPDATE), answers_once=(EventKind.AFTER_UPDATE,)
    )
    watching, optimizer = board(probe, a=1), Optimizer()
    watching.begin_step(1)
    assert EventKind.AFTER_UPDATE in watching.wanted
    watching.sample(Event(EventKind.BEFORE_UPDATE, 1, optimizer=optimizer), 1.0, [])
    assert EventKind.AFTER_UPDATE not in watching.wanted
    watching.heard_elsewhere(frozenset({EventKind.AFTER_UPDATE}))
    watching.begin_step(2)
    watching.sample(Event(EventKind.BEFORE_UPDATE, 2, optimizer=optimizer), 2.0, [])
    assert EventKind.AFTER_UPDATE in watching.wanted


def test_in_a_step_that_nobody_announced_all_that_may_be_heard_is_worth_building() -> None:
    watching = board(Listening(only_when_due=STEP), a=5)
    watching.begin_step(3)
    assert watching.wanted == set()
    watching.sample(Event(EventKind.LOSS, 4), 4.0, [])
    assert watching.wanted == set(STEP)


def test_the_metrics_that_are_due_at_a_step_are_known_while_it_is_under_way() -> None:
    probe, demand = Listening(), RuleDemand()
    demand.every.update(a=1, b=3)
    watching = ProbeBoard({probe.name: probe}, demand, Dispatch())
    due = []
    for step in range(1, 7):
        watching.begin_step(step)
        due.append(sorted(demand.due_now))
        assert due[-1] == [key for key in ("a", "b") if demand.due(key, step)]
    assert due == [["a"], ["a"], ["a", "b"]] * 2


def test_samples_carry_the_time_of_their_event() -> None:
    made: list[Sample] = []
    board(Listening(), a=1).sample(Event(EventKind.BEFORE_UPDATE, 1), 12.5, made)
    assert [(sample.metric, sample.time) for sample in made] == [("a", 12.5)]


def test_a_probe_that_raises_three_times_is_left_out_and_the_others_go_on() -> None:
    class Broken(Listening):
        name = "broken"
        provides = (Metric("c", "A third."),)

        def sample(self, event: Event, demand: Any) -> Any:
            super().sample(event, demand)
            raise ValueError("no value")

    broken, probe, demand, dispatch = Broken(), Listening(), RuleDemand(), Dispatch()
    demand.every.update(a=1, c=1)
    watching = ProbeBoard({broken.name: broken, probe.name: probe}, demand, dispatch)
    run(watching, 4)
    assert [error.to_json()["count"] for error in dispatch.errors] == [1, 1, 1]
    assert len(broken.calls) == 3
    assert len(probe.calls) == 12


def test_once_the_run_is_over_nothing_is_wanted_and_probes_are_closed() -> None:
    closed = []
    probe = Listening(close=lambda: closed.append("closed"))
    watching = board(probe, a=1)
    watching.begin_step(1)
    watching.close(lambda function: function())
    watching.begin_step(2)
    assert watching.wanted == set()
    assert closed == ["closed"]


def test_a_state_that_cannot_be_read_costs_only_its_probe() -> None:
    def unreadable(state: Any) -> None:
        raise KeyError(state)

    watching = board(Listening(state_dict=lambda: "kept", load_state_dict=unreadable), a=1)
    assert watching.state_dict() == {"listening": "kept"}
    (sentence,) = watching.load_state_dict({"listening": "old", "gone": 1})
    assert sentence.startswith("the probe listening starts fresh: its saved state cannot be read (KeyError")


# -- rests that have nothing to do with optimizers, and rows that nobody need be asked about


def test_a_probe_whose_rest_has_nothing_to_do_with_optimizers_rests_also_where_they_take_turns() -> None:
    probe = pausing(3, until=6)
    probe.rests_always = True
    watching, one, two = board(probe, a=1), Optimizer(), Optimizer()
    for step in range(1, 8):
        watching.begin_step(step)
        watching.sample(Event(EventKind.BEFORE_UPDATE, step, optimizer=one), float(step), [])
        if step > 1:
            watching.sample(Event(EventKind.BEFORE_UPDATE, step, optimizer=two, optimizer_index=1), float(step), [])
        assert (EventKind.LOSS in watching.wanted) is not (3 < step < 6)
    assert called(probe, EventKind.BEFORE_UPDATE) == [1, 2, 2, 3, 3, 6, 6, 7, 7]


def test_nor_does_a_new_optimizer_end_such_a_rest() -> None:
    probe = pausing(3, until=100)
    probe.rests_always = True
    watching = board(probe, a=1)
    run(watching, 4, optimizer=Optimizer())
    watching.sample(Event(EventKind.BEFORE_UPDATE, 5, optimizer=Optimizer()), 5.0, [])
    assert called(probe, EventKind.BEFORE_UPDATE) == [1, 2, 3]


class Reading(Listening):
    """A probe that is asked about rows."""

    noted = (EventKind.STEP_END,)

    def __init__(self, **declared: Any) -> None:
        super().__init__(**declared)
        self.asked: list[list[int]] = []

    def sample_rows(self, rows: Any, demand: Any) -> Any:
        self.asked.append([row.step for row in rows])
        return ()


def asked(probe: Reading, *blocks: list[StepRow]) -> list[list[int]]:
    watching = board(probe, a=1)
    for rows in blocks:
        watching.rows += rows
        watching.take_rows()
    return probe.asked


@pytest.mark.parametrize("fact", ["max_norm", "found"])
def test_a_probe_is_asked_about_rows_only_where_one_has_what_it_needs(fact: str) -> None:
    def row(step: int, **more: Any) -> StepRow:
        return StepRow(step, over=True, **more)

    needed = {"max_norm": 0.0} if fact == "max_norm" else {"found": {"listening": 1}}
    others = {"loss_scale": 1.0} if fact == "max_norm" else {"found": {"somebody else": 1}}
    blocks = [row(1), row(2, **others)], [row(3), row(4, **needed), row(5)], [row(6)]
    assert asked(Reading(rows_with=fact), *blocks) == [[3, 4, 5]]
    assert asked(Reading(), *blocks) == [[1, 2], [3, 4, 5], [6]]
    assert asked(Reading(rows_with="no such field"), [row(1)]) == [[1]]


def test_where_something_happens_those_are_called_who_otherwise_read_rows() -> None:
    """But for one whose rest has nothing to do with what happens in a step."""
    reading, steady = Reading(events_from=100), Reading(events_from=100, rests_always=True)
    for probe, wakes in ((reading, True), (steady, False)):
        watching = board(probe, a=1)
        watching.begin_step(5, rows=True)
        assert EventKind.LOSS not in watching.wanted
        watching.look_closely()
        watching.sample(Event(EventKind.LOSS, 5), 5.0, [])
        assert (called(probe, EventKind.LOSS) == [5]) is wakes
        assert (EventKind.LOSS in watching.wanted) is wakes


def until(probe: Listening, **every: int) -> int:
    """Where steps are noted in rows: the step after the third before which nothing has to be worked out."""
    watching = board(probe, **every)
    watching.begin_step(3, rows=True)
    return watching.busy_at


def test_a_step_is_passed_over_where_only_a_metric_is_due_that_comes_from_rows_or_from_one_who_rests() -> None:
    resting = {"events_from": 100}
    assert until(Reading(**resting), a=5) == 100
    # Somebody is called at that pace, or looks at updates and has to know what is due.
    assert until(Reading(**resting, only_when_due=STEP), a=5) == 5
    assert until(Reading(**resting, look=lambda row, update: None), a=5) == 5
    assert until(Reading(**resting, look=lambda row, update: None), a=5, of_nobody=4) == 5


def test_once_somebody_wakes_in_a_step_it_knows_all_that_is_due_there() -> None:
    probe = Reading(events_from=10)
    watching = board(probe, a=5, b=7)
    watching.begin_step(3, rows=True)
    assert watching.busy_at == 10
    watching.begin_step(10, rows=True)
    assert EventKind.LOSS in watching.wanted
    assert watching._demand.due_now == {"a"}
