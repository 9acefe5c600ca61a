"""The step machine alone: what it is fed, in any order, and the events that it makes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from healthcheck.assembly import open_session
from healthcheck.core.errors import StopTraining
from healthcheck.core.events import Event, EventKind
from healthcheck.instrument import step_events as showing
from healthcheck.instrument import unseen
from healthcheck.instrument.controls import StopSwitch, TorchControls, capabilities_of
from healthcheck.instrument.machine import StepMachine
from healthcheck.instrument.modelview import FoundModel
from healthcheck.instrument.step_events import EndedBy, Stage
from healthcheck.run.actor import StopRequest
from healthcheck.run.ending import Ending

LETTERS = {
    EventKind.TRAIN_START: "T",
    EventKind.STEP_START: "S",
    EventKind.BATCH_READY: "D",
    EventKind.LOSS: "L",
    EventKind.BACKWARD_END: "G",
    EventKind.BEFORE_UPDATE: "U",
    EventKind.AFTER_UPDATE: "A",
    EventKind.STEP_END: "E",
}
"""Data, loss, gradients complete, update, applied, end."""


class Fed:
    """A machine with two optimizers, ``a`` and ``b``, that is fed word by word.

    ``a`` is an update of that optimizer, ``a?`` one that a ``GradScaler`` skipped, ``a!`` one whose step raises, ``a*`` one
    with a closure that is evaluated twice, ``a(`` one that begins and ``a)`` one that ends. ``pass`` is a backward pass, ``pass!`` one that fails,
    ``pass(ab)`` one in which optimizers step. ``end`` and ``begin`` are said by a loop or a framework, with a number by a
    framework that counts.
    """

    def __init__(self, optimizers: str = "ab", *, ended_by: EndedBy = EndedBy.UPDATES, first: int = 0) -> None:
        self.session = open_session(rules={"version": 1, "rules": {}}, target="x", console=False, record=False)
        self.events: list[Event] = []
        self.removers = [self.session.on(kind, self.events.append) for kind in LETTERS]
        parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in "ab"}
        self.optimizers = {name: torch.optim.SGD([p], lr=0.1) for name, p in parameters.items()}
        view = FoundModel([torch.nn.ParameterDict(parameters)])
        controls = TorchControls(self.session, view, StopSwitch(self.session.stop), capabilities_of("script"))
        self.session.bind(controls)
        only = [self.optimizers[name] for name in optimizers]
        self.machine = StepMachine(self.session, view, controls, only=only, ended_by=ended_by)
        if first:
            self.machine.start_at(first)
        self._parameters = parameters

    def feed(self, words: str) -> Fed:
        for word in words.split():
            self.word(word)
        return self

    def word(self, word: str) -> None:
        machine = self.machine
        if word.startswith("pass"):
            machine.pass_begins(torch.tensor(1.5))
            if word.endswith("!"):
                machine.pass_fails()
                return
            for name in word[len("pass") :].strip("()"):
                machine.update_begins(self.optimizers[name], (self.optimizers[name],), {})
                machine.update_ends(self.optimizers[name])
            machine.pass_ends()
        elif word == "clip":
            machine.clipped(torch.tensor(4.0), 1.0, parameters=list(self._parameters.values()))
        elif word == "batch":
            machine.batch_drawn(torch.ones(4, 2), 0.0, [], gradients=True)
        elif word == "evaluate":
            machine.batch_drawn(torch.ones(4, 2), 0.0, [], gradients=False)
        elif word == "anew":
            machine.begin_anew()
        elif word.startswith("begin"):
            machine.step_begins(int(word[len("begin") :]))
        elif word.startswith("end"):
            machine.step_ends(number=int(word[len("end") :]) if word != "end" else None, loss=0.5)
        else:
            self.update(self.optimizers[word[0]], word[1:])

    def update(self, optimizer: Any, how: str) -> None:
        machine = self.machine
        if how == "?":
            unseen.update_skipped(machine, optimizer, torch.tensor(2.0))
            return
        if how == ")":
            machine.update_ends(optimizer)
            return
        args: tuple[Any, ...] = (optimizer,)
        if how == "*":
            args = (optimizer, lambda: self.word("pass"))
        made = machine.update_begins(optimizer, args, {})
        if how == "*" and made is not None:
            made[0][1]()
            made[0][1]()
        if how not in ("!", "("):
            machine.update_ends(optimizer)

    @property
    def seen(self) -> str:
        return " ".join(f"{LETTERS[event.kind]}{event.step}" for event in self.events)

    def close(self) -> None:
        self.machine.finish()
        self.session.finish(Ending())
        assert self.session.internal_errors == []


@contextlib.contextmanager
def fed(*given: Any, **options: Any) -> Iterator[Fed]:
    machine = Fed(*given, **options)
    try:
        yield machine
    finally:
        machine.close()


ONE = "S1 L1 G1 U1 A1 E1"
TWO = "S2 L2 G2 U2 A2 E2"

ONE_OPTIMIZER = {
    "a plain loop": ("pass a pass a", f"T1 {ONE} {TWO}"),
    "several passes for one update": ("pass pass pass a", "T1 S1 L1 L1 L1 G1 U1 A1 E1"),
    "an update without a pass": ("a a", "T1 S1 G1 U1 A1 E1 S2 G2 U2 A2 E2"),
    "passes without an update, then one": ("pass pass a pass", "T1 S1 L1 L1 G1 U1 A1 E1 S2 L2"),
    "gradients are complete when they are clipped": ("pass clip a", f"T1 {ONE}"),
    "clipped in parts": ("pass clip clip a", f"T1 {ONE}"),
    "clipped before any pass": ("clip pass a", f"T1 {ONE}"),
    "clipped after the update": ("pass a clip pass a", f"T1 {ONE} {TWO}"),
    "data begins a step, before training has begun": ("batch pass a batch", f"S1 D1 T1 {ONE[3:]} S2 D2"),
    "data that nobody trains on": ("pass a evaluate pass a", f"T1 {ONE} {TWO}"),
    "a scaler skips": ("pass a? pass a", f"T1 S1 L1 E1 {TWO}"),
    "a closure": ("a* pass", "T1 S1 L1 G1 U1 A1 E1 S2 L2"),
    "a pass fails": ("pass! pass a", "T1 S1 L1 L1 G1 U1 A1 E1"),
    "an optimizer fails, and is called again": (
        "pass a! a pass a",
        "T1 S1 L1 G1 U1 E1 S2 U2 A2 E2 S3 L3 G3 U3 A3 E3",
    ),
    "an optimizer fails, and its step is given up": ("pass a! pass a", "T1 S1 L1 G1 U1 L1 E1 S2 U2 A2 E2"),
    "it steps inside the pass": ("pass(a) pass(a)", "T1 S1 L1 E1 S2 L2 E2"),
    "another training": ("pass a anew pass a", f"T1 {ONE} T2 {TWO}"),
    "another training in the middle of a step": ("pass anew pass a", "T1 S1 L1 T2 S2 L2 G2 U2 A2 E2"),
}


@pytest.mark.parametrize("case", ONE_OPTIMIZER)
def test_the_events_of_one_optimizer(case: str) -> None:
    words, wanted = ONE_OPTIMIZER[case]
    with fed("a") as machine:
        assert machine.feed(words).seen == wanted


BOTH = "S1 L1 G1 U1 A1 L1 G1 U1 A1 E1"
TWO_OPTIMIZERS = {
    "in turn": ("pass a pass b pass a pass b", f"T1 {BOTH} {BOTH.replace('1', '2')}"),
    "one pass for both": ("pass a b", "T1 S1 L1 G1 U1 A1 G1 U1 A1 E1"),
    "the second never steps": (
        "pass a pass a pass a",
        "T1 S1 L1 G1 U1 A1 L1 E1 S2 G2 U2 A2 E2 L2 S3 G3 U3 A3 E3",
    ),
    "the second steps at times: in the step of the first": (
        "pass a pass b pass a pass a pass b",
        f"T1 {BOTH} S2 L2 G2 U2 A2 L2 E2 S3 G3 U3 A3 E3 L3 G3 U3 A3",
    ),
    "one inside the other's step": ("pass a( b a)", "T1 S1 L1 G1 U1 U1 A1 E1 A1"),
    "both inside the pass": ("pass(ab) pass(ab)", "T1 S1 L1 E1 S2 L2 E2"),
}


@pytest.mark.parametrize("case", TWO_OPTIMIZERS)
def test_the_events_of_two_optimizers(case: str) -> None:
    words, wanted = TWO_OPTIMIZERS[case]
    with fed("ab") as machine:
        assert machine.feed(words).seen == wanted


def test_without_any_optimizer_each_pass_is_a_step() -> None:
    with fed("") as machine:
        assert machine.feed("pass pass").seen == "T1 S1 L1 G1 E1 S2 L2 G2 E2"
        assert machine.session.unit == "backward"


BY_A_LOOP = {
    "it says when its step is over": ("pass a end pass a end", f"T1 {ONE} {TWO}"),
    "several updates in a step": ("pass a b end a", "T1 S1 L1 G1 U1 A1 U1 A1 E1 S2 G2 U2 A2"),
    "a step for each of two optimizers": (
        "pass a end pass b end pass a end",
        f"T1 {ONE} {TWO} {ONE.replace('1', '3')}",
    ),
    "it forgets to say so": ("pass a pass a end", "T1 S1 L1 G1 U1 A1 L1 E1 S2 U2 A2 L2 E2"),
    "an update that nobody saw": ("end end", "T1 S1 L1 E1 S2 L2 E2"),
    "clipping begins a step, where passes are not seen": ("clip a end clip", "T1 S1 G1 U1 A1 L1 E1 S2 G2"),
    "a pass that is the update": ("pass(a) end pass(ab) end", "T1 S1 L1 E1 S2 L2 E2"),
}
BY_A_FRAMEWORK = {
    "it counts": ("begin5 pass a end5 begin6 pass a end6", f"T1 {ONE.replace('1', '5')} {ONE.replace('1', '6')}"),
    "it says the end alone": ("pass a end1 end2", f"T1 {ONE} S2 L2 E2"),
    "its update takes several steps of an optimizer": ("begin1 pass a a end1", "T1 S1 L1 G1 U1 A1 U1 A1 E1"),
    "data before it says which step it is": ("batch begin3 pass a end3", "S1 D1 T1 L3 G3 U3 A3 E3"),
    "a pass after the end of a step": ("begin1 pass a end1 pass begin2 a end2", f"T1 {ONE} {TWO}"),
    "a pass that is the update": ("begin1 pass(a) end1", "T1 S1 L1 E1"),
}


@pytest.mark.parametrize("case", BY_A_LOOP)
def test_the_events_of_a_loop_that_ends_its_steps(case: str) -> None:
    words, wanted = BY_A_LOOP[case]
    with fed("ab", ended_by=EndedBy.LOOP) as machine:
        assert machine.feed(words).seen == wanted


@pytest.mark.parametrize("case", BY_A_FRAMEWORK)
def test_the_events_of_a_framework_that_counts(case: str) -> None:
    words, wanted = BY_A_FRAMEWORK[case]
    with fed("ab", ended_by=EndedBy.FRAMEWORK) as machine:
        assert machine.feed(words).seen == wanted


def test_a_run_that_goes_on_counts_from_where_it_was() -> None:
    with fed("a", first=7) as machine:
        assert machine.feed("pass a pass a").seen == f"T8 {ONE.replace('1', '8')} {ONE.replace('1', '9')}"


def test_an_end_that_is_asked_for_in_the_middle_is_heeded() -> None:
    with fed("a") as machine:
        machine.feed("pass a")
        machine.session.stop.most_steps = 2
        with pytest.raises(StopTraining, match="asked for 2 steps"):
            machine.feed("pass a")
        assert machine.seen == f"T1 {ONE} {TWO}"


def test_the_stages_of_a_step() -> None:
    with fed("a") as machine:
        steps = machine.machine
        stages = [steps.stage]
        steps.pass_begins(torch.tensor(1.0))
        stages.append(steps.stage)
        steps.pass_ends()
        stages.append(steps.stage)
        steps.update_begins(machine.optimizers["a"])
        stages.append(steps.stage)
        steps.pass_begins(torch.tensor(1.0))  # a closure
        stages.append(steps.stage)
        steps.pass_ends()
        stages.append(steps.stage)
        steps.update_ends(machine.optimizers["a"])
        stages.append(steps.stage)

    assert [stage.value for stage in stages] == [
        "idle",
        "backward",
        "forward",
        "updating",
        "backward",
        "updating",
        "ended",
    ]
    assert stages[-1] is Stage.ENDED


def test_what_is_known_of_one_update_is_not_known_of_the_next() -> None:
    with fed("a") as machine:
        machine.feed("pass clip a pass a")
        first, second = (e for e in machine.events if e.kind is EventKind.BEFORE_UPDATE)
        assert (float(first.grad_norm), first.max_norm, len(first.clipped or ())) == (4.0, 1.0, 2)
        assert (second.grad_norm, second.max_norm, second.clipped) == (None, None, None)


def test_an_update_that_a_framework_announces_is_not_counted_a_second_time_by_the_hooks() -> None:
    with fed("a", ended_by=EndedBy.FRAMEWORK) as machine:
        steps, optimizer = machine.machine, machine.optimizers["a"]
        for number in (1, 2):
            steps.step_begins(number)
            steps.update_begins(optimizer, announced=True)
            steps.update_begins(optimizer, (optimizer,), {})  # of torch's hook, inside
            steps.update_ends(optimizer)
            steps.update_ends(optimizer)
            steps.step_ends(number=number)

        assert machine.seen == "T1 S1 G1 U1 A1 E1 S2 G2 U2 A2 E2"


def test_a_machine_that_pauses_shows_nothing_until_it_goes_on() -> None:
    with fed("a") as machine:
        machine.feed("pass a")
        resume = machine.machine.pause()
        machine.update(machine.optimizers["a"], "")
        before = machine.seen
        resume()
        machine.feed("pass a")

        assert (before, machine.seen) == (f"T1 {ONE}", f"T1 {ONE} {TWO}")


@pytest.mark.parametrize("ended_by", [EndedBy.UPDATES, EndedBy.LOOP])
def test_nothing_is_built_that_nobody_listens_to(ended_by: EndedBy, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[EventKind] = []

    def build(kind: EventKind, *given: Any, **facts: Any) -> Event:
        built.append(kind)
        return Event(kind, *given, **facts)

    monkeypatch.setattr(showing, "Event", build)
    with fed("a", ended_by=ended_by) as machine:
        for remove in machine.removers:
            remove()
        remove = machine.session.on("after_update", machine.events.append)
        machine.feed(
            "batch pass a end batch pass clip a end" if ended_by is EndedBy.LOOP else "batch pass a batch pass clip a"
        )
        assert machine.seen == "A1 A2"
        remove()
        machine.feed("batch pass a")

    wanted = {
        EventKind.AFTER_UPDATE,
        EventKind.STEP_END,
        EventKind.BEFORE_UPDATE,
    }  # the last two: where rules are judged
    assert set(built) <= wanted
    assert built.count(EventKind.AFTER_UPDATE) == 2


WORDS = st.sampled_from(
    [
        "pass",
        "pass!",
        "pass(a)",
        "pass(b)",
        "pass(ab)",
        "a",
        "a",
        "a",
        "b",
        "b",
        "a?",
        "b?",
        "a!",
        "a*",
        "a(",
        "b(",
        "clip",
        "clip",
        "batch",
        "evaluate",
        "anew",
        "end",
    ]
)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(WORDS, max_size=40), st.sampled_from(["a", "ab", ""]), st.sampled_from([0, 7]))
def test_any_order_of_calls_is_taken(words: list[str], optimizers: str, first: int) -> None:
    """Never an error, never a step backwards, and each step begins and ends at most once."""
    check(words, optimizers, first, EndedBy.UPDATES)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(WORDS, max_size=40))
def test_any_order_of_calls_is_taken_where_a_loop_ends_its_steps(words: list[str]) -> None:
    check(words, "ab", 0, EndedBy.LOOP)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(WORDS, st.sampled_from(["begin", "end", "end"])), max_size=40))
def test_any_order_of_calls_is_taken_where_a_framework_counts(words: list[str]) -> None:
    number, numbered = 0, []
    for word in words:
        numbered.append(f"{word}{number + 1}" if word in ("begin", "end") else word)
        number += word == "end"
    check([word for word in numbered if word != "anew"], "ab", 0, EndedBy.FRAMEWORK)


def check(words: list[str], optimizers: str, first: int, ended_by: EndedBy) -> None:
    with fed(optimizers, ended_by=ended_by, first=first) as machine:
        machine.feed(" ".join(words))
        steps = [event.step for event in machine.events]
        assert steps == sorted(steps)
        assert all(step > first for step in steps)
        for kind in (EventKind.STEP_START, EventKind.STEP_END):
            numbers = [event.step for event in machine.events if event.kind is kind]
            assert len(numbers) == len(set(numbers))
        assert machine.machine.stage is not Stage.BACKWARD


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(WORDS, max_size=20), st.lists(WORDS, max_size=20))
def test_a_stop_is_raised_wherever_it_comes_and_nothing_is_left_in_the_middle(
    before: list[str], after: list[str]
) -> None:
    with fed("ab") as machine:
        machine.feed(" ".join(before))
        machine.session.stop.request = StopRequest("r", 1, "enough")
        for word in after:
            with contextlib.suppress(StopTraining):
                machine.word(word)
            if machine.machine.stage is Stage.BACKWARD:  # as the hook does, whose pass is never run
                machine.machine.pass_fails()
        assert machine.session.stop.raised or not any(word in ("a", "b", "a?", "b?", "pass") for word in after)
