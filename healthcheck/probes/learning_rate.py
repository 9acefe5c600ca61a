"""Learning rates as the optimizer uses them, against their own schedule; and optimizers that were silently replaced."""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.rows import StepRow
from healthcheck.core.runinfo import Places, weak
from healthcheck.core.samples import NO_LABELS, Metric, Sample
from healthcheck.device.deferred import largest, number, where
from healthcheck.device.sampling import KeptSamplers, SampledRows
from healthcheck.device.tensors import evenly
from healthcheck.probes.labels import optimizer_labels, with_label
from healthcheck.probes.looks import LOOK_EVERY, LOOK_SELDOM, next_look

SETTLED = 20
"""Updates after which an optimizer has a schedule of its own, and can be replaced."""
LOOK_CLOSELY = 100
"""Updates after which a tenth of these looks is enough: weights move fastest at the start."""
TENSORS = 8
ALIKE = 0.5
"""Relative distance under which weights are the same model's, some steps apart."""
STRETCH = 500
"""Updates over which, or twice that, ``lr.fraction`` looks back."""
COURSES = 8
"""Optimizers remembered; inner loops make them by the thousand."""
LOW = 1 / 3
"""Part of a warm-up's goal at which it begins, at the most."""
CLIMB = 3
"""Updates, at the least, over which a warm-up rises."""
_FLOATS = {float}
_PARAMS = operator.itemgetter("params")


class LearningRateProbe:
    """Reads learning rates before the update (after it, a scheduler may have moved on), and compares each with what went
    before.

    While the optimizer stays the same object, its scheduler may do as it likes: cycles, restarts
    and steps are its schedule. Without a scheduler, a rate above the highest so far that no steady
    warm-up explains is a jump. So is another rate of a new optimizer that takes over a model in
    the middle of its training: tensors of the same shapes, weights close to those that the old
    optimizer left, and not those it began with (which would be another fold or another seed). If
    the old one had state (momentum) and the new one has none, it has been *replaced*, unless its
    rate is a lower one of its own (a second stage of the training), or a framework was asked to
    train once more.

    *Warm-ups*: how often the rate of the first optimizer fell back, in one step, to where its warm-up began. Only falls
    from the highest rate since the warm-up's beginning, over at least three rising updates: a schedule that restarts or
    goes in cycles has come down before it begins again. Counting ends with the optimizer.
    """

    name = "learning-rate"
    listens_to: tuple[EventKind, ...] = (
        EventKind.TRAIN_START,
        EventKind.BEFORE_UPDATE,
        EventKind.AFTER_UPDATE,
        EventKind.STEP_END,
    )
    answers_once = (EventKind.AFTER_UPDATE, EventKind.STEP_END)
    noted = (EventKind.AFTER_UPDATE, EventKind.STEP_END)
    provides: tuple[Metric, ...] = (
        Metric("lr", "Learning rate; the largest of all parameter groups."),
        Metric("lr", "Learning rate of one parameter group.", labels=("group",)),
        Metric("lr.jump", "Learning rate divided by what its schedule so far predicts; 1 is as expected."),
        Metric(
            "lr.fraction",
            f"Learning rate under a scheduler, divided by its highest in the last {STRETCH} to {2 * STRETCH} updates.",
            needs=("a schedule",),
        ),
        Metric(
            "lr.warmups",
            "How often the learning rate fell from its peak to where its warm-up began, in a single step.",
            needs=("a schedule", "a warm-up"),
        ),
        Metric("optimizer.replaced", "1 when a new optimizer without state takes over a trained model, else 0."),
    )

    def __init__(self) -> None:
        self._given: dict[int, int] = {}
        """Step of the last answer, by optimizer."""
        self._by_group = self._follows = self._counts_warmups = True
        self._courses = _Courses()
        self._warmups = _Warmups()
        self._names: dict[int, tuple[Callable[[], Any], list[Any]]] = {}
        """By optimizer: a weak reference, and what its groups are called."""
        self.events_from = 0
        """Step from which on an optimizer is to be seen, where steps are noted in rows."""

    def plan(self, demand: Demand) -> None:
        self._by_group = demand.wants("lr[]")
        self._follows = any(map(demand.wants, ("lr.jump", "lr.fraction", "optimizer.replaced")))
        self._counts_warmups = demand.wants("lr.warmups")

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.run is not None:
            self._courses.places = event.run.places
        if event.kind is EventKind.TRAIN_START:  # a further `fit()` has optimizers of its own, on purpose
            self._courses.forget()
            return ()
        index, step, optimizer = event.optimizer_index, event.step, event.optimizer
        if self._given.get(index) == step:
            return ()
        own = largest_rate(optimizer)
        rate = number(event.lr) if own is None else own
        if rate is None:
            return ()
        self._given[index] = step
        if self._by_group and hasattr(optimizer, "param_groups"):
            self._names[index] = weak(optimizer), group_names(optimizer)
        samples = [Sample("lr", step, rate, optimizer_labels(index))]
        if self._by_group:
            samples += [
                Sample("lr", step, of_group, with_label(optimizer_labels(index), "group", name))
                for name, of_group in group_rates(optimizer).items()
            ]
        if type(own) is float and event.kind is EventKind.BEFORE_UPDATE:
            if self._follows:
                samples += self._courses.follow(optimizer, index, step, demand, own)
            warmups = self._warmups
            if self._counts_warmups and index == 0 and (own != warmups.rate or warmups.optimizer() is not optimizer):
                samples += warmups.changed(optimizer, own, step)
        if event.row is not None:
            looks = next_look(step, LOOK_EVERY, LOOK_SELDOM)
            self.events_from = min(looks, demand.next_due(("lr.fraction",), step)) if self._follows else sys.maxsize
        return samples

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        made: list[Sample] = []
        known = self._courses.by_id
        for row in rows:
            index, step = row.optimizer_index, row.step
            if self._given.get(index) == step:
                continue
            rates = row.rates
            rate: Any = None
            if rates:
                rate = max(rates) if set(map(type, rates)) == _FLOATS else _largest_of(rates)
            own = rate
            if rate is None:
                rate = number(row.lr)
            if rate is None:
                continue
            self._given[index] = step
            labels, time = (
                optimizer_labels(index) if index else NO_LABELS,
                row.update_time if row.seen else row.time,
            )
            made.append(Sample("lr", step, rate, labels, time=time))
            samples: list[Sample] = []
            optimizer = row.optimizer() if self._by_group or type(own) is float else None
            if self._by_group:
                names = self._names_of(row, optimizer)
                samples += [
                    Sample("lr", step, of_group, with_label(labels, "group", name), time=time)
                    for name, of_group in named_rates(names, rates).items()
                ]
            if optimizer is None:
                if type(own) is float and row.seen:
                    self._courses.went(row.optimizer, own, step)
                made += samples
                continue
            if row.seen and not self._by_group:
                # One update more at an unchanged rate, nearly always: as `_Course.add`, at no call in every step.
                course = known.get(id(optimizer))
                if (
                    course is not None
                    and course.optimizer() is optimizer
                    and rate == course.rate
                    and course.updates % STRETCH
                ):
                    course.before, course.updates, course.last_step = rate, course.updates + 1, step
                    continue
            if type(own) is float and row.seen:
                if self._follows:
                    samples += self._courses.follow(optimizer, index, step, demand, own, late=True)
                warmups = self._warmups
                if (
                    self._counts_warmups
                    and index == 0
                    and (own != warmups.rate or warmups.optimizer() is not optimizer)
                ):
                    samples += warmups.changed(optimizer, own, step)
            for sample in samples:
                sample.time = time
                made.append(sample)
        return made

    def _names_of(self, row: StepRow, optimizer: Any) -> list[Any]:
        """Names of an optimizer's groups; the script may have let go of it since."""
        if optimizer is not None:
            self._names[row.optimizer_index] = row.optimizer, group_names(optimizer)
        known = self._names.get(row.optimizer_index)
        return known[1] if known is not None and known[0] is row.optimizer else []

    def state_dict(self) -> dict[str, Any]:
        rate = self._courses.rate
        return {} if rate is None else {"rate": rate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._courses.resumed = float(state["rate"]) if "rate" in state else None


@dataclass(slots=True)
class _Course:
    """What one optimizer object did so far. Keeps neither it nor its parameters alive."""

    optimizer: Callable[[], Any]
    shapes: frozenset[Any]
    kind: type[Any]
    """The optimizer's class."""
    first_weights: list[SampledRows]
    last_weights: list[SampledRows]
    updates: int = 0
    last_step: int = 0
    rate: float = 0.0
    before: float = 0.0
    peak: float = 0.0
    first: float = 0.0
    """Rate of the first update."""
    recent: tuple[float, float] = (0.0, 0.0)
    """Highest rate of the present and of the last stretch of :data:`STRETCH` updates."""
    had_state: bool = False
    scheduled: bool = False
    """Whether a scheduler drives the rate."""
    replaced: bool = False

    def add(self, rate: float, step: int) -> None:
        """One update more, with this rate."""
        if self.updates % STRETCH == 0:
            self.recent = (0.0, self.recent[0])
        # Two stretches, so that the highest rate is forgotten in steps and not all at once.
        self.recent = (max(self.recent[0], rate), self.recent[1])
        self.before, self.rate = (self.rate if self.updates else rate), rate
        self.peak = max(self.peak, rate)
        self.updates += 1
        self.last_step = step


class _Courses:
    """Courses of the optimizers that began last."""

    def __init__(self) -> None:
        self._known: list[_Course] = []
        self.by_id: dict[int, _Course] = {}
        """The same, by the ids of their optimizers; ids are given again."""
        self.resumed: float | None = None
        """Rate at which the run that this one goes on with had stopped, until it was compared."""
        self.places = Places()
        """Where optimizers were made."""
        self._samplers = KeptSamplers()

    @property
    def rate(self) -> float | None:
        """Last rate of the oldest optimizer that is remembered."""
        return self._known[0].rate if self._known else None

    def forget(self) -> None:
        self._known.clear()
        self.by_id.clear()

    def of(self, optimizer: Any) -> _Course | None:
        """What is known of an optimizer."""
        course = self.by_id.get(id(optimizer))
        return course if course is not None and course.optimizer() is optimizer else None

    def went(self, optimizer: Callable[[], Any], rate: float, step: int) -> None:
        """One update, at this rate, of an optimizer that the script has let go since: of a weak reference nothing else is left."""
        for course in self._known:
            if course.optimizer is optimizer:
                course.add(rate, step)

    def follow(
        self, optimizer: Any, index: int, step: int, demand: Demand, rate: float, *, late: bool = False
    ) -> list[Sample]:
        """One update of an optimizer, with this rate.

        :param late: weights are not those of the update any more, and are not looked at.
        """
        course = self.of(optimizer)
        if course is not None:
            looks = not late and (step % LOOK_EVERY == 0 or "lr.fraction" in demand.due_now)
            if not looks and (course.scheduled or rate == course.rate):  # nearly always
                course.add(rate, step)
                return []
            course.had_state = course.had_state or len(optimizer.state) > 0
            if not late and step % (LOOK_EVERY if course.updates < LOOK_CLOSELY else 10 * LOOK_EVERY) == 0:
                course.last_weights = self._look(optimizer, "last")
        return self._samples(optimizer, index, step, demand, course, rate)

    def _samples(
        self, optimizer: Any, index: int, step: int, demand: Demand, course: _Course | None, rate: float
    ) -> list[Sample]:
        jump: Any = None
        replaced: Any = 0.0
        detail = None
        scheduled = _has_scheduler(optimizer)
        if course is None:
            course, jump, replaced, detail = self._begin(optimizer, index, step, rate)
        elif course.updates >= SETTLED:
            jump = 1.0
            # A steady warm-up by hand goes on as it went from the update before to the last one.
            ceiling = max(course.peak, course.rate, 2 * course.rate - course.before)
            if rate > ceiling > 0 and not scheduled:
                jump = rate / ceiling
        labels = optimizer_labels(index)
        samples = [Sample("optimizer.replaced", step, replaced, labels, detail=detail)]
        if jump is not None:
            samples.append(Sample("lr.jump", step, jump, labels, detail=detail))
        course.scheduled = scheduled
        course.add(rate, step)
        # Only what a scheduler of torch did: a rate that is cut when the loss stands still (ReduceLROnPlateau) ends low.
        if demand.due("lr.fraction", step) and max(course.recent) > 0 and scheduled:
            samples.append(Sample("lr.fraction", step, rate / max(course.recent), labels))
        return samples

    def _begin(self, optimizer: Any, index: int, step: int, rate: float) -> tuple[_Course, Any, Any, Any]:
        """The first update of an optimizer object: does it continue what another one began?"""
        weights = self._look(optimizer, "first")
        new = _Course(weak(optimizer), _shapes(optimizer), type(optimizer), weights, weights, first=rate)
        old = self._predecessor(new, step)
        self._known = [*self._known[1 - COURSES :], new]
        self.by_id = {id(made): course for course in self._known if (made := course.optimizer()) is not None}
        if old is None:
            jump = None
            if self.resumed is not None and index == 0:
                jump = rate / self.resumed if self.resumed > 0 else None
                self.resumed = None
            return new, jump, 0.0, None
        same = self._same_model(old, new)
        old.replaced = True
        expected = max(old.rate, 0.0)
        jump = where(same, rate / expected if expected > 0 else 1.0, 1.0)
        # A restart takes the rate up where it was, begins the old schedule again, or jumps up; a lower rate of its
        # own is a further stage of the training, which begins with a clean optimizer on purpose.
        continued = rate > expected or any(abs(rate - known) <= 0.01 * known for known in (old.first, expected))
        lost_state = old.had_state and len(optimizer.state) == 0 and continued
        replaced = where(same, 1.0, 0.0) if lost_state else 0.0
        facts = {"before": f"{expected:.3g}", "now": f"{rate:.3g}", "optimizer": "a new object, trained weights"}
        place = self.places.made(optimizer)
        facts |= {"where": place} if place else {}
        return new, jump, replaced, lambda: facts

    def _predecessor(self, new: _Course, step: int) -> _Course | None:
        """A settled optimizer of tensors of the same shapes that stepped until just now.

        And of the same class: SGD after Adam, or LBFGS to finish with, is a further stage of the training.
        """
        for old in reversed(self._known):
            alike = old.shapes == new.shapes and old.kind is new.kind
            if alike and not old.replaced and old.updates >= SETTLED and step - old.last_step <= 2:
                return old
        return None

    def _look(self, optimizer: Any, role: str) -> list[SampledRows]:
        """Some of its weights now; what was read before in the same role may be overwritten."""
        params = list(chain.from_iterable(map(_PARAMS, optimizer.param_groups)))
        return self._samplers.of(optimizer, evenly(params, TENSORS)).weights(role)

    @staticmethod
    def _same_model(old: _Course, new: _Course) -> Any:
        """Whether weights lie near the old ones' last, and are not their first: 1 or 0."""
        import torch

        now = torch.cat([rows.values.flatten().float() for rows in new.first_weights])
        last = torch.cat([rows.values.flatten().float().to(now.device) for rows in old.last_weights])
        first = torch.cat([rows.values.flatten().float().to(now.device) for rows in old.first_weights])
        if not now.shape == last.shape == first.shape:
            return 0.0
        near = (now - last).norm() <= ALIKE * last.norm()
        return number(near & (now != first).any())


def _shapes(optimizer: Any) -> frozenset[Any]:
    return frozenset(Counter(tuple(p.shape) for g in optimizer.param_groups for p in g["params"]).items())


def _has_scheduler(optimizer: Any) -> bool:
    """Whether a torch scheduler drives it: they all mark the step that they wrap."""
    return bool(getattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched", False)) or any(
        "initial_lr" in group for group in optimizer.param_groups
    )


class _Warmups:
    """The warm-ups of one optimizer at a time."""

    def __init__(self) -> None:
        self.optimizer: Callable[[], Any] = lambda: None
        self._begin(0.0)

    def _begin(self, rate: float) -> None:
        self._start = self.rate = rate
        self._rises = self._again = 0
        self._fell = False

    def changed(self, optimizer: Any, rate: float, step: int) -> Iterable[Sample]:
        """This rate is another one than that of the update before, or this optimizer is."""
        if self.optimizer() is not optimizer:
            self.optimizer = weak(optimizer)
            self._begin(rate)
            return ()
        before, self.rate = self.rate, rate
        if rate > before:
            self._rises += 1
            return ()
        again = rate <= LOW * before and abs(rate - self._start) <= 0.01 * self._start
        if again and self._rises >= CLIMB and not self._fell:
            self._again += 1
        else:
            self._fell = True
        if again:
            self._rises, self._fell = 0, False
        return (Sample("lr.warmups", step, float(self._again)),)


REACHED = 0.1
"""Part of its goal from which on a schedule is no longer looked at."""
REACH_SETTLED = 50
"""Updates before which nothing is said."""
LATE = 0.5
"""Part of the planned steps after which a warm-up should be well under way."""
TREAD, TREADS = 8, 4
"""Updates at one and the same rate that make a stair, and stairs after which OneCycleLR is taken for stepped per epoch."""


class ScheduleReachProbe:
    """Follows the rate of the first optimizer while a scheduler of torch keeps it below a tenth of its goal.

    The goal is the peak of a ``OneCycleLR``, else the rate that the optimizer was built with. It is out of reach where
    more than half of the planned steps are over (frameworks say how many), where a ``OneCycleLR``, which counts
    updates, moves only every few dozen of them, and where the rate began below a hundredth and falls, or at the square of the
    goal: a ``LambdaLR`` whose function returns the rate itself, and not its factor. Runs that go on from a checkpoint are not judged.
    """

    name = "schedule-reach"
    rests_for_all = True
    listens_to: tuple[EventKind, ...] = (EventKind.TRAIN_START, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "lr.reached",
            "Highest rate so far as a share of the schedule's peak, once the peak is out of reach; else 1.",
            needs=("a schedule", "a schedule that begins below its goal"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._planned: int | None = None
        self._updates = 0
        self._first = self._highest = self._rate = 0.0
        self._tread = 0
        self._stairs = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.TRAIN_START:
            self._planned = event.max_steps
            return ()
        if event.optimizer is None or event.optimizer_index > 0:
            return ()
        rate, goal = largest_rate(event.optimizer), scheduled_goal(event.optimizer)
        # A run that goes on from a checkpoint is in the middle of its schedule.
        goes_on = not self._updates and (event.step > 1 or len(event.optimizer.state) > 0)
        if type(rate) is not float or goes_on or (self._updates and not goal) or rate >= REACHED * goal > 0:
            self.rests_until = sys.maxsize
            return (Sample("lr.reached", event.step, 1.0),)
        self._follow(rate)
        if goal <= 0 or self._updates < REACH_SETTLED or not demand.due("lr.reached", event.step):
            return ()
        why = self._out_of_reach(event, goal)
        value = self._highest / goal if why else 1.0

        def facts() -> Mapping[str, Any]:
            return {"goal": f"{goal:.3g}", "highest": f"{self._highest:.3g}", "why": why}

        return (Sample("lr.reached", event.step, value, detail=facts if why else None),)

    def _follow(self, rate: float) -> None:
        if not self._updates:
            self._first = rate
        elif rate == self._rate:
            self._tread += 1
        else:
            self._stairs += self._tread + 1 >= TREAD
            self._tread = 0
        self._updates += 1
        self._rate = rate
        self._highest = max(self._highest, rate)

    def _out_of_reach(self, event: Event, goal: float) -> str:
        if self._planned and event.step > LATE * self._planned:
            return f"{event.step:,} of {self._planned:,} planned steps are over"
        if self._stairs >= TREADS and "max_lr" in event.optimizer.param_groups[0]:
            return f"OneCycleLR counts updates and was stepped only {self._stairs} times in {self._updates:,} of them"
        if self._rate < self._first == self._highest < 0.01 * goal:
            return "it began there and falls"
        if self._first == self._highest and abs(self._first - goal * goal) <= 1e-6 * goal * goal:
            return (
                "it began at the square of its goal: the function of LambdaLR returns the rate, and not a factor of it"
            )
        return ""


def scheduled_goal(optimizer: Any) -> float:
    """The rate that the schedule is meant to reach; 0 where no scheduler of torch drives it."""
    goals = [group.get("max_lr", group.get("initial_lr")) for group in optimizer.param_groups]
    return max((goal for goal in map(number, goals) if type(goal) is float), default=0.0)


def group_rates(optimizer: Any) -> dict[str, Any]:
    """Learning rate by group: its name where it has one, else its number. Rates on a device are deferred numbers."""
    groups = getattr(optimizer, "param_groups", ())
    return named_rates(group_names(optimizer), [number(group.get("lr")) for group in groups]) if groups else {}


def group_names(optimizer: Any) -> list[Any]:
    """What the groups of an optimizer are called; None for one without a name."""
    return [group.get("name") for group in optimizer.param_groups]


def _largest_of(rates: Sequence[Any]) -> Any:
    known = [rate for rate in rates if rate is not None]
    return largest(known) if known else None


def named_rates(names: Sequence[Any], rates: Sequence[Any]) -> dict[str, Any]:
    """As :func:`group_rates`, of rates that were read before.

    :param names: as of :func:`group_names`.
    """
    named: dict[str, Any] = {}
    for place, (name, rate) in enumerate(zip(names, rates, strict=False)):
        if rate is not None:
            named[name if isinstance(name, str) and name not in named else str(place)] = rate
    return named


def largest_rate(optimizer: Any) -> Any:
    """The largest rate of all groups, a deferred number where one is on a device; None without any."""
    groups: Any = getattr(optimizer, "param_groups", ())
    if len(groups) == 1:
        rate = groups[0].get("lr")
        return rate if type(rate) is float else number(rate)
    return _largest_of([number(group.get("lr")) for group in groups])


def rates_of(optimizer: Any, params: list[Any]) -> list[float]:
    """Learning rate per parameter; a rate that lives on a device counts as above zero."""
    by_id: dict[int, float] = {}
    for group in optimizer.param_groups:
        rate = number(group.get("lr", 1.0))
        if type(rate) is not float:
            rate = 1.0
        if len(optimizer.param_groups) == 1:
            return [rate] * len(params)
        for parameter in group["params"]:
            by_id[id(parameter)] = rate
    return [by_id[id(p)] for p in params]
