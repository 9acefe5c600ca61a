"""Which optimizers there are: how many train, which are idle, rebuilt for each update, or resumed without their state,
and schedulers that nobody steps; state dicts that were loaded without effect."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import number
from healthcheck.device.living import live_objects
from healthcheck.probes.labels import first_few, where_called, where_made
from healthcheck.probes.learning_rate import largest_rate, scheduled_goal
from healthcheck.probes.looks import LOOK_EVERY, LOOK_SELDOM, next_look

MOST = 64
"""Optimizers that are distinguished; inner loops make them by the thousand."""


class OptimizerCountProbe:
    """Counts optimizers of different parameters, as they make updates.

    The two of a GAN are two from the first step on, and so are those of two folds or two trials in one script; a new
    optimizer for the same parameters (a second stage) is none.
    """

    name = "optimizer-count"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric("optimizers", "Optimizers of different parameters that have made an update so far."),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._seen: list[Callable[[], Any]] = []

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.optimizer is None:
            return ()
        first: Any = None
        for group in event.optimizer.param_groups:
            if group["params"]:
                first = group["params"][0]
                break
        if len(self._seen) < MOST and not [known for known in self._seen if known() is first]:
            self._seen.append(weak(first))
        self.rests_until = next_look(event.step, LOOK_EVERY, LOOK_SELDOM)
        return (Sample("optimizers", event.step, float(len(self._seen))),)


REBUILT_LOOK_EVERY = 50
"""Steps between two looks at an optimizer that has made a second update."""


class RebuiltOptimizerProbe:
    """Counts optimizers in a row that took over the same parameters and made one update each.

    Adam without its moments is the sign of the gradient, and momentum that begins anew is none. Plain SGD has nothing
    to lose and is not counted, nor are optimizers of copies (inner loops of meta learning).
    """

    name = "rebuilt-optimizer"
    rests_for_all = True
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "optimizer.rebuilt",
            "Consecutive optimizers of the same parameters, with state to lose, that made one update each.",
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._optimizer: Callable[[], Any] = lambda: None
        self._first: Callable[[], Any] = lambda: None
        """The first parameter of the optimizer before."""
        self._row = 0
        self._step = 0
        """Of the update before that was seen."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        optimizer = event.optimizer
        if optimizer is None or event.optimizer_index > 0:
            return ()
        follows, self._step = self._step == event.step - 1, event.step
        # A second update by the same object: this loop keeps its optimizer.
        if self._optimizer() is optimizer:
            self._row = 0
            self.rests_until = next_look(event.step, REBUILT_LOOK_EVERY, LOOK_SELDOM)
            return (Sample("optimizer.rebuilt", event.step, 0.0),)
        first = optimizer.param_groups[0]["params"][0] if optimizer.param_groups[0]["params"] else None
        same = follows and first is not None and self._first() is first
        self._row = self._row + 1 if same and has_memory(optimizer) and not optimizer.state else 0
        self._optimizer, self._first = weak(optimizer), weak(first)
        return (Sample("optimizer.rebuilt", event.step, float(self._row)),)


def has_memory(optimizer: Any) -> bool:
    """Whether its updates depend on the gradients before: momentum, or averages of gradients."""
    known = optimizer.defaults
    return (
        "betas" in known or "beta2_decay" in known or "rho" in known or "alpha" in known or bool(known.get("momentum"))
    )


class ResumedOptimizerProbe:
    """Looks once, at the first update of a run that does not begin at step 1, for moments and momentum.

    A run begins with its first backward pass: some may come before the first update, as those of an attack on the inputs.
    Optimizers that come later are another matter: a second stage, a further ``fit()``, another side of a game.
    """

    name = "resumed-optimizer"
    rests_always = True
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "optimizer.state_lost",
            "1 if a run resumes at a later step and its optimizer has no state, else 0.",
            needs=("a resume",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._looked = False

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        optimizer = event.optimizer
        if self._looked or (optimizer is None and event.step > 1):
            return ()
        self._looked, self.rests_until = True, sys.maxsize
        if event.step <= 1 or not hasattr(optimizer, "defaults"):
            return ()
        lost = has_memory(optimizer) and not optimizer.state
        return (Sample("optimizer.state_lost", event.step, float(lost)),)


BELOW = 0.5
"""Part of the schedule's goal below which a rate is that of a warm-up: nobody holds that back on purpose."""
WARM_UP_PASSES, PASSES = 2.2, 10.0
"""Passes over the data after which a schedule that is stepped per epoch has been stepped: a warm-up, and any other."""
WARM_UP_BLIND, BLIND = 1_500, 10_000
"""Updates that stand for these passes where no loader has a length. A stream may be long: it counts as any other."""
UNSTEPPED_LOOK_EVERY = 100
"""Updates between two looks where a framework reports the epoch."""
_BEGIN_LATE = frozenset({"SWALR"})
"""Schedulers that are built with the others, and stepped for the first time in the last part of a training."""


class UnsteppedSchedules:
    """Optimizers that step and none of whose schedulers has ever been stepped.

    It is not enough that no scheduler has been stepped: many are stepped at the end of an epoch, and some only once
    a warm-up by hand is over. So the count waits for some passes over the data. A rate that is another one than the
    scheduler set is the script's own, and no fault.
    """

    def __init__(self) -> None:
        self._pass = 0
        """Updates of the longest pass over the data, at the most; 0: unknown."""
        self._streams = False
        """Whether there is a loader without a length."""
        self._epoch: float | None = None
        """At the first look, where a framework reports it."""
        self._waiting: list[Callable[[], Any]] = []
        """Schedulers that had not been stepped when last looked at."""
        self.next_look = sys.maxsize
        """Updates after which there is something to judge."""

    def batch(self, event: Event) -> None:
        """A batch of the first step: how many of its kind make a pass? Fewer updates than batches do no harm."""
        if event.n_samples and event.dataset_size:
            self._pass = max(self._pass, math.ceil(event.dataset_size / event.n_samples))
        else:
            self._streams = True

    def look(self, schedulers: Sequence[tuple[Any, Any]], stepping: Sequence[Any], made: int, event: Event) -> None:
        """The living schedulers, each with its optimizer, after so many updates."""
        if self._epoch is None:
            self._epoch = event.epoch
        self._waiting = [weak(s) for s, _ in _unstepped(schedulers, stepping)]
        self.next_look = made

    def judge(self, event: Event, made: int) -> Iterable[Sample]:
        """How many optimizers it is by now; nothing while that is open."""
        step = event.step
        alive = (ref() for ref in self._waiting)
        there = [
            (s, s.optimizer) for s in alive if s is not None and s.last_epoch <= 0 and _sets_the_rate(s, s.optimizer)
        ]
        if not there:
            self.next_look = sys.maxsize
            return (Sample("schedule.unstepped", step, 0.0),)
        # Optimizers differ in their goals, and so in how long a wait proves something.
        needed = {id(o): self._needed(o, made, event.epoch) for _, o in there}
        self.next_look = min((n for n in needed.values() if n > made), default=sys.maxsize)
        hit = [(s, o) for s, o in there if needed[id(o)] <= made]
        if not hit:
            return ()
        names = ", ".join(sorted({type(s).__name__ for s, _ in hit}))
        rate = largest_rate(hit[0][1])
        place = where_made(event, hit[0][0])

        def facts() -> Mapping[str, Any]:
            facts = {
                "which": names,
                "updates": f"{made:,}",
                "lr": f"{rate:.3g}, as it was when the scheduler was built",
            }
            return facts | place

        count = len({id(o) for _, o in hit})
        return (Sample("schedule.unstepped", step, float(count), detail=facts),)

    def _needed(self, optimizer: Any, made: int, epoch: float | None) -> int:
        """Updates after which one of its schedulers would have been stepped, or after which it is asked again."""
        rate, goal = largest_rate(optimizer), scheduled_goal(optimizer)
        warms_up = type(rate) is float and rate < BELOW * goal
        passes = WARM_UP_PASSES if warms_up else PASSES
        if epoch is not None and self._epoch is not None:
            return made if epoch - self._epoch >= passes else made + UNSTEPPED_LOOK_EVERY
        if self._pass and not self._streams:
            return math.ceil(passes * self._pass)
        return WARM_UP_BLIND if warms_up and not self._streams else BLIND


def _unstepped(schedulers: Sequence[tuple[Any, Any]], stepping: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    """Of optimizers none of whose schedulers has been stepped: parts of a ``SequentialLR`` wait for their turn."""
    used = {id(o) for s, o in schedulers if s.last_epoch > 0}
    for scheduler, optimizer in schedulers:
        if not any(optimizer is s for s in stepping) or id(optimizer) in used or scheduler.optimizer is not optimizer:
            continue
        if type(scheduler).__name__ not in _BEGIN_LATE and _sets_the_rate(scheduler, optimizer):
            yield scheduler, optimizer


def _sets_the_rate(scheduler: Any, optimizer: Any) -> bool:
    """Whether the rates in use are those that it left."""
    rates, left = [group["lr"] for group in optimizer.param_groups], getattr(scheduler, "_last_lr", None)
    return isinstance(left, list) and len(left) == len(rates) and all(map(_alike, rates, left))


def _alike(rate: Any, left: Any) -> bool:
    rate, left = number(rate), number(left)
    return type(rate) is float and rate == left


LOOKS = (150, 1500)
"""Updates after which the process is searched. Before the first, a stage of the training may be yet to come."""
STEPPED = 10
"""Steps from which on a scheduler counts as used."""
SHORT = 100
"""Half a cycle of a cosine with fewer updates is no plan for a training."""


class IdleOptimizerProbe:
    """Looks at the optimizers and schedulers that live beside those of the training, twice in a run.

    *Idle*: tensors that get gradients, one more after the look, and whose optimizer has never made a step, while another
    optimizer makes one after another. *Elsewhere*: schedulers that are stepped and whose optimizer makes no step, while
    another one updates the same parameters: it was built anew after the scheduler. *Half cycles*: of a ``CosineAnnealingLR``, which rises again
    after ``T_max`` steps, where that are fewer than :data:`SHORT` and it is stepped per update. *Unstepped*: optimizers
    that make steps and whose schedulers make none (:class:`UnsteppedSchedules`).
    """

    name = "idle-optimizers"
    rests_for_all = True
    listens_to: tuple[EventKind, ...] = (EventKind.BATCH_READY, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "optimizer.idle",
            f"Tensors with gradients that belong to an optimizer without a step, after {LOOKS[0]} and {LOOKS[1]:,} updates.",
            cost=Cost.HOST,
            needs=(f"{LOOKS[0]} updates",),
        ),
        Metric(
            "schedule.elsewhere",
            "Schedulers that are stepped and whose optimizer is not, while another one updates its parameters.",
            cost=Cost.HOST,
            needs=(f"{LOOKS[0]} updates",),
        ),
        Metric(
            "schedule.half_cycles",
            f"How often a CosineAnnealingLR has gone down or up, each time within {SHORT} updates or fewer; else 0.",
            cost=Cost.HOST,
            needs=(f"{LOOKS[0]} updates",),
        ),
        Metric(
            "schedule.unstepped",
            "Optimizers that step while their scheduler, which was never stepped, should have changed the learning rate.",
            cost=Cost.HOST,
            needs=(f"{LOOKS[0]} updates", "some passes over the data"),
        ),
    )

    def __init__(self) -> None:
        self._first: int | None = None
        self._looks = list(LOOKS)
        self._unstepped = UnsteppedSchedules()
        self._idle: list[tuple[Callable[[], Any], Callable[[], Any], int]] = []
        """Tensors, their gradients and how often these were written, of optimizers that may be idle; asked once more."""
        self.rests_until = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.BATCH_READY:
            if self._first is None:
                self._unstepped.batch(event)
            return ()
        if event.model is None or event.optimizer is None or event.optimizer_index > 0:
            return ()
        if self._first is None:
            self._first = event.step
        made = event.step - self._first + 1
        if self._idle:
            fed, self._idle = sum(_fed(*one) for one in self._idle), []
            return (Sample("optimizer.idle", event.step, float(fed)),)
        samples: list[Sample] = []
        if self._looks and made >= self._looks[0]:
            self._looks = [look for look in self._looks if look > made]
            samples += self._look_around(event, made)
        if made >= self._unstepped.next_look:
            samples += self._unstepped.judge(event, made)
        if not samples:
            next_look = min(self._looks[0] if self._looks else sys.maxsize, self._unstepped.next_look)
            self.rests_until = self._first + next_look - 2 if next_look < sys.maxsize else sys.maxsize
        return samples

    def _look_around(self, event: Event, made: int) -> Iterator[Sample]:
        assert event.model is not None
        stepping = [*event.model.optimizers(), event.optimizer]
        held = {id(p) for optimizer in stepping for p in _parameters(optimizer)}
        around = live_objects("Optimizer", "LRScheduler")
        idle = {id(p): p for optimizer in around for p in _idle(optimizer, held)}
        # Gradients may be left from an earlier training of this process: only who gets a new one counts, at the next update.
        self._idle = [(weak(p), weak(p.grad), p.grad._version) for p in idle.values()]
        schedulers = [(s, _driven(s, stepping)) for s in around if hasattr(s, "last_epoch")]
        elsewhere = [s for s, optimizer in schedulers if _is_elsewhere(s, optimizer, stepping, held)]
        cycling = [(n, s) for s, optimizer in schedulers for n in _half_cycles(s, optimizer, stepping, made)]
        cycles, cycler = max(cycling, key=lambda pair: pair[0], default=(0.0, None))
        stepped = where_made(event, cycler, "stepped") or where_made(event, cycler)
        self._unstepped.look(schedulers, stepping, made, event)

        place = where_made(event, elsewhere[0]) if elsewhere else {}

        def which() -> Mapping[str, Any]:
            return {"which": ", ".join(sorted({type(s).__name__ for s in elsewhere}))} | place

        if not self._idle:
            yield Sample("optimizer.idle", event.step, 0.0)
        yield Sample("schedule.elsewhere", event.step, float(len(elsewhere)), detail=which)
        yield Sample("schedule.half_cycles", event.step, cycles, detail=lambda: stepped)


def _parameters(optimizer: Any) -> list[Any]:
    """Those that it holds itself; wrappers of a framework round an optimizer hold none."""
    return [p for group in vars(optimizer).get("param_groups") or () for p in group["params"]]


def _fed(parameter: Callable[[], Any], gradient: Callable[[], Any], version: int) -> bool:
    """Whether it got a gradient since the look: what another training left behind in this process gets none."""
    here, before = parameter(), gradient()
    return here is not None and here.grad is not None and (before is None or before._version != version)


def _idle(optimizer: Any, held: set[int]) -> Iterator[Any]:
    """Its parameters with gradients, if it shares none with the optimizers that step, and has not stepped before."""
    own = _parameters(optimizer)
    if own and not optimizer.state and held.isdisjoint(map(id, own)):
        yield from (p for p in own if p.requires_grad and p.grad is not None)


def _driven(scheduler: Any, stepping: list[Any]) -> Any:
    """The optimizer of a scheduler, out of the wrappers that frameworks put round it."""
    optimizer: Any = getattr(scheduler, "optimizer", None)
    for _ in range(3):
        if any(optimizer is s for s in stepping) or not hasattr(optimizer, "optimizer"):
            break
        optimizer = optimizer.optimizer
    return optimizer


def _is_elsewhere(scheduler: Any, optimizer: Any, stepping: list[Any], held: set[int]) -> bool:
    if optimizer is None or any(optimizer is s for s in stepping) or not hasattr(optimizer, "param_groups"):
        return False
    if getattr(optimizer, "_opt_called", False):  # torch's own mark: it has stepped since the scheduler was built
        return False
    own = _parameters(optimizer)
    used = int(getattr(scheduler, "_step_count", 0)) > STEPPED
    return bool(used and own and all(id(p) in held for p in own))


def _half_cycles(scheduler: Any, optimizer: Any, stepping: list[Any], updates: int) -> Iterator[float]:
    if type(scheduler).__name__ != "CosineAnnealingLR" or not any(optimizer is s for s in stepping):
        return
    made, half = int(scheduler.last_epoch), float(scheduler.T_max)
    if 0 < half < SHORT and made > updates / 2:
        yield made / half


# --------------------------------------------------------------------------------------------------
# State dicts that fit nowhere, or are the model's own tensors.


class LoadedStateProbe:
    """Counts loads that changed nothing, in modules that are trained.

    *Unmatched*: with ``strict=False``, and not one name was found in the module that was given them. A checkpoint of
    a wrapped model (``module.``, ``model.``, ``_orig_mod.``) is the usual case. Loads of which a part fits are a way to
    begin with another model's body, and are not counted.

    *Own*: during the training, from tensors that are the module's own. ``best = model.state_dict()`` is no copy. The
    same is counted for *copies* of the trained model, which should have been given the model's weights.
    """

    name = "loaded-state"
    only_with = "loads"
    listens_to: tuple[EventKind, ...] = (EventKind.STEP_END, EventKind.TRAIN_END)
    provides: tuple[Metric, ...] = (
        Metric("state.unmatched", "State dicts loaded since the last step in which no name matched."),
        Metric(
            "state.own",
            "State dicts loaded since the last step that were the module's own tensors, not copies of them.",
        ),
        Metric(
            "state.own_copy",
            "The same for copies of the trained model, such as target networks: they were given their own weights.",
        ),
    )

    def __init__(self) -> None:
        self._begun = False
        """Whether both were given once: from then on only what is found is worth a sample."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        loads = event.loads
        if loads is None or (self._begun and not loads):
            return ()
        unmatched = [text for module, text in loads.unmatched if _is_part(module(), event)]
        samples = [
            *self._samples("state.unmatched", unmatched, event),
            *self._samples("state.own", [*loads.own], event),
            *self._samples("state.own_copy", [*loads.copies], event),
        ]
        self._begun = self._begun or bool(samples)
        return samples

    def _samples(self, metric: str, found: Sequence[str], event: Event) -> Iterable[Sample]:
        # A run that ends without a step has trained nothing of which it could be said that all was in order.
        if not found and (self._begun or event.kind is EventKind.TRAIN_END):
            return ()
        facts = {"which": first_few(found)} | (where_called(event, "load") if found else {})
        return (Sample(metric, event.step, float(len(found)), detail=lambda: facts),)


def _is_part(module: Any, event: Event) -> bool:
    return module is not None and event.model is not None and any(m is module for _, m in event.model.named_modules())
