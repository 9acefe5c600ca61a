"""The judging points of a run: samples to the mailbox and back, then through the rules, in blocks of steps.

The way of one block stands here from top to bottom: what probes and scripts have given is posted step by step, what
has arrived is put together again by step, handed out and judged, and what the rules say goes back to whoever owns the
judge. A judgement costs more to begin with than to go on with, so several short steps share one. How the stream is cut
into blocks changes nothing of what is found (see :meth:`healthcheck.engine.engine.Engine.judge`), only how soon.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Protocol

from healthcheck.core.errors import StopTraining
from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Action
from healthcheck.core.rows import StepRow
from healthcheck.core.samples import Sample
from healthcheck.engine.columns import History, Moment, step_by_step
from healthcheck.engine.engine import Engine
from healthcheck.engine.episodes import NOTHING, Evaluation
from healthcheck.extend.dispatch import Dispatch
from healthcheck.rulelang.rule import Cause, Derived

JUDGED_AT = frozenset(
    {
        EventKind.BEFORE_UPDATE,
        EventKind.STEP_END,
        EventKind.EVAL_END,
        EventKind.TEST_END,
        EventKind.CHECKPOINT_SAVED,
        EventKind.EPOCH_END,
        EventKind.TRAIN_END,
    }
)
"""Events at which a block may end. Before the update only where it may have to be held back."""
BLOCK_STEPS = 32
"""Steps in a block, at most."""
BLOCK_SECONDS = 0.25
"""Seconds of active training that a block spans, at most; a step that takes longer is a block of its own."""
WARM_UP = 8
"""At the start a block has at most this part of the steps so far: bounds that hold back updates are those of the last
judgement, and while windows fill they change from step to step."""

_DRAINED_AT = frozenset({EventKind.CHECKPOINT_SAVED, EventKind.TRAIN_END})
"""Events that wait for the values of the device: nothing may be left unjudged behind them."""
_SAMPLES = itemgetter(1)
"""Of a moment."""
_VALUE, _TIME = attrgetter("value"), attrgetter("time")
"""Of a sample."""
_END = ""
"""The metric of the mark behind all samples of a step: no sample has it."""
_HANGS = 1.0
"""Seconds without an event from which on the watchdog judges what the training thread has left."""


class Mailbox(Protocol):
    """Brings device scalars to the host without waiting for them."""

    def post(self, step: int, samples: Sequence[Sample]) -> None:
        """Take the samples of one step; device values start their copy now."""

    def hold(self, step: int, numbers: Sequence[Any]) -> None:
        """Have deferred numbers travel with the next post or :meth:`send`; samples made of them are posted later."""

    def send(self) -> bool:
        """Start the copies of what is held: the step is over, and nothing was posted. Returns whether some is still held."""

    def receive(self, rows: Sequence[StepRow]) -> int | None:
        """Have the numbers of these rows that have arrived. Never waits.

        Returns the oldest step of which something is still on its way: of them, or of what was posted or is held.
        """

    def ready(self) -> list[Sample]:
        """Samples whose values have arrived, oldest first, as numbers. Never waits."""

    def drain(self) -> list[Sample]:
        """Everything that is still under way. Waits for the device."""


class Gate(Protocol):
    """An adapter's way to hold back an update by the values that it would be made from."""

    waits: bool
    """True while the update at hand can only be held back if the host waits for its values."""

    def see(self, samples: Sequence[Sample]) -> None:
        """The samples of the update at hand, before they leave for the host."""


class Judge:
    """Judges the samples of one run. Called at :data:`JUDGED_AT` by the training thread.

    :param acting: given the ids of the rules that a gate holds to their bounds: metrics by which another rule could still
        change the update at hand, so that it must be judged before each (see :func:`acted_upon`).
    :param history: keeps the samples that have arrived, as numbers, before they are judged.
    :param dispatch: its reports hear of them, step by step, also of steps without any where rules count those.
    :param shown: called with step and samples where a plugin has a hook for them.
    :param found: called with what the rules found in one step and the event at which they did; None: silence, in
        another thread, or the end of a step of which there is no event.
    """

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        *,
        acting: Callable[[Collection[str]], frozenset[str]],
        history: History,
        dispatch: Dispatch,
        shown: Callable[[int, Sequence[Sample]], None],
        found: Callable[[Evaluation, Event | None], None],
    ) -> None:
        self.waiting: list[Sample] = []
        """Samples that have not been posted yet: probes and scripts add to it."""
        self.exchange: Callable[[int], None] | None = None
        """With several ranks that decide together: called at the end of a step, after it has been judged."""
        self.exchange_every = 1
        """Steps between two points at which ranks may agree: a block ends there."""
        self.rows: Callable[..., list[Sample]] = lambda *, arrived_only: []
        """Samples of the steps that were noted in rows since it was called last, in the order of their steps. With
        ``arrived_only`` none from the first step on of which numbers are still on a device."""
        self.due_step = 0
        """The step at whose end :meth:`block_over` is to be called, if no event ends the block before; 0: the next one."""
        self.due_time = -math.inf
        """The same in seconds of active training."""
        self.alarmed = False
        """True while an update is shown that is not finite, or may have to be held back: its row cannot wait for the end
        of its block. Set by whoever trains."""
        self._engine = engine
        self._mailbox = mailbox
        self._gate: Gate | None = None
        self._acting_beside = acting
        self._acting = acting(())
        self._history, self._dispatch, self._shown = history, dispatch, shown
        self.judged_at = 0.0
        """Seconds of active training at the last judgement: the engine's clock, for the record."""
        self._found = found
        self._pending: list[Sample] = []
        """What has arrived of steps that are not complete, or not to be judged yet."""
        self._first = engine.step
        self._judged = engine.step
        """The last step that was judged, or a part of it."""
        self._look_for_silence = False
        """The watchdog asks for a look of rules on silence, once what waits has been judged."""
        self._judging = False
        self._lock = threading.RLock()  # the watchdog judges silence from a thread of its own

    def take(self, engine: Engine, acting: Callable[[Collection[str]], frozenset[str]]) -> None:
        """Other rules from here on; all that the present ones wait for has been judged."""
        with self._lock:
            self._engine, self._acting_beside, self.due_step = engine, acting, 0
            self.gate = None  # whoever holds updates back asks the new rules

    @property
    def gate(self) -> Gate | None:
        """Set by an adapter once a rule may hold back updates."""
        return self._gate

    @gate.setter
    def gate(self, gate: Gate | None) -> None:
        self._gate = gate
        rules = getattr(gate, "rules", None)
        self._acting = self._acting_beside([rule.id for rule in rules.rules] if rules else ())

    @property
    def acts_before_updates(self) -> bool:
        """Whether some rule must be judged before each update: then every step is a block of its own."""
        return bool(self._acting)

    def __call__(self, event: Event, now: float) -> None:
        """Take the samples of this event; where a block ends, judge it.

        :param now: seconds of active training.
        """
        kind, step = event.kind, event.step
        with self._lock:
            if kind is EventKind.BEFORE_UPDATE:
                self._before_update(event, now)
            elif kind is not EventKind.STEP_END:
                self._end(step, now, event, wait=kind in _DRAINED_AT)
            elif step >= self.due_step or now >= self.due_time or self._acting or not self._go_on(step, now):
                self.block_over(step, now, event)

    def block_over(self, step: int, now: float, event: Event | None = None) -> None:
        """The end of a step that ends its block; without an event where none was built."""
        with self._lock:
            self._end(step, now, event, whole=True)
            made = step - self._first
            self.due_step = step + max(1, min(BLOCK_STEPS, made // WARM_UP))
            self.due_time = now + BLOCK_SECONDS
            if self.exchange is not None:
                self.due_step = min(self.due_step, step - step % self.exchange_every + self.exchange_every)
                self.exchange(step)

    def flush(self, step: int, now: float) -> None:
        """Judge all that there is, even if that takes a wait: whoever saves the state of rules must not lose any."""
        with self._lock:
            if not self._judging:
                self._end(step, now, None, wait=True)

    def silence(self, seconds: float, now: float) -> None:
        """Judge ``stale`` rules from the watchdog's thread.

        What waits for the end of its block is no silence: while training goes on the training thread looks itself,
        behind that; once it hangs, it is judged from here. Gives up after a second: a main thread that holds the lock
        for longer is judging, so it does not hang.

        :param seconds: for how long nothing has happened.
        :param now: seconds of active training.
        """
        if not self._lock.acquire(timeout=1.0):
            return
        try:
            if seconds < _HANGS and now < self.due_time + _HANGS:
                self._look_for_silence = True
                self.due_step = 0
                return
            if seconds >= _HANGS:
                self._judge(self._take(wait=False), None)
            result = self._engine.tick(seconds, now)
            if result is not NOTHING:
                self._found(result, None)
        finally:
            self._lock.release()

    # -- where a block ends -----------------------------------------------------------------

    def _before_update(self, event: Event, now: float) -> None:
        """The last moment to hold back an update: a gate compares with bounds, what has none must be judged here."""
        gate = self._gate
        waits = gate is not None and gate.waits
        urgent = waits or self.alarmed
        if urgent:
            self.waiting += self.rows(arrived_only=True)
        if gate is not None and self.waiting:
            gate.see(self.waiting)
        if urgent:
            self._end(event.step, now, event, wait=waits)
            return
        # Values of a device wait for the end of the step in any case, so that they travel in one copy.
        here, late = list[Sample](), list[Sample]()
        for sample in self.waiting:
            value = sample.value
            if type(value) is float or not _comes_late(value):
                here.append(sample)
                broken = value - value != 0.0 if type(value) is float else not _finite(value)
                urgent = urgent or broken or sample.metric in self._acting
            else:
                late.append(sample)
        if urgent:
            self.waiting = here
            self._end(event.step, now, event)
            self.waiting = late + self.waiting

    def _go_on(self, step: int, now: float) -> bool:
        """The end of a step within a block: False if it ends the block all the same."""
        waiting, self.waiting = self.waiting, []
        waiting.append(Sample(_END, step, 0.0, time=now))
        self._mailbox.post(step, waiting)
        # What is not finite must not wait. A device says so as soon as its values have come.
        for sample in waiting if getattr(self._mailbox, "oldest", None) is None else self._arrivals():
            value = sample.value
            if type(value) is float and value - value != 0.0:
                return False
        return True

    def _arrivals(self) -> list[Sample]:
        arrived = self._mailbox.ready()
        self._pending += arrived
        return arrived

    def _end(self, step: int, now: float, event: Event | None, *, wait: bool = False, whole: bool = False) -> None:
        """Judge what there is.

        :param wait: for the values of the device as well.
        :param whole: the step is over, and judged even if no sample came of it.
        """
        mailbox = self._mailbox
        self._pending += mailbox.drain() if wait else mailbox.ready()
        rows = self.rows(arrived_only=not wait)
        before = None if wait else getattr(mailbox, "oldest", None)  # also of rows that were left where they are
        complete: list[Sample] = []
        if before is not None or not _floats(self.waiting):
            # What is older than all that is under way, or is sent for now, need not queue with it.
            complete = [sample for sample in rows if sample.step < (step if before is None else before)]
            if complete and _floats(complete):
                self._put_in(complete)
            else:
                complete = []
        self.waiting += rows[len(complete) :]
        if self.waiting or whole:
            waiting, self.waiting = self.waiting, []
            waiting.append(Sample(_END, step, 0.0, time=now))
            mailbox.post(step, waiting)
        self._judge(self._take(wait=wait, before=before), event)
        if self._look_for_silence:
            self._look_for_silence = False
            result = self._engine.tick(0.0, now)
            if result is not NOTHING:
                self._found(result, event)

    def _put_in(self, rows: Sequence[Sample]) -> None:
        """Samples of steps that are complete, among what has arrived: behind what events gave in the same steps."""
        pending, begin, place = self._pending, rows[0].step, 0
        for sample in pending:
            if sample.metric == _END and sample.step >= begin:
                break
            place += 1
        pending[place:place] = [*rows, Sample(_END, rows[-1].step, 0.0, time=max(map(_TIME, rows)))]

    def _take(self, *, wait: bool, before: int | None = None) -> list[Moment]:
        """What has arrived, put together by step. Steps of which a value is still under way are left for the next time.

        :param before: the first step whose rows were left where they are.
        """
        mailbox = self._mailbox
        self._pending += mailbox.drain() if wait else mailbox.ready()
        under_way = getattr(mailbox, "oldest", None)
        if before is not None:  # it may have arrived since
            under_way = before if under_way is None else min(before, under_way)
        pending, self._pending = self._pending, []
        steps: dict[int, list[Sample]] = {}
        ends: dict[int, float] = {}
        others: dict[int, list[Sample]] = {}
        known = self._judged
        last = max([sample.step for sample in pending if sample.metric == _END], default=known)
        begin = 0
        for end, mark in enumerate(pending):
            if mark.metric != _END:
                continue
            at = mark.step
            if under_way is not None and at >= under_way:
                break
            ends[at] = max(mark.time, ends.get(at, -math.inf))
            for sample in pending[begin:end]:
                # Somebody may log values of a step long gone, or counted in another way: they come with the step at hand.
                own = known <= sample.step <= last
                (steps if own else others).setdefault(sample.step if own else at, []).append(sample)
            begin = end + 1
        if wait:  # what a device gives only on request comes behind the mark of its step
            for sample in pending[begin:]:
                own = known <= sample.step <= last
                (steps if own else others).setdefault(sample.step if own else last, []).append(sample)
        else:
            self._pending = pending[begin:]
        made: list[Moment] = []
        now = self._engine.now
        # Nothing is called for a step here: most have no end of their own (they were noted in rows), and no late values.
        for step in sorted({*steps, *ends, *others}):
            samples = steps.get(step, ())
            if step in ends:
                now = max(now, ends[step])
            else:
                for sample in samples:
                    if sample.time > now:
                        now = sample.time
            late = others.get(step, ())
            if under_way is not None and step >= under_way:
                self._pending[:0] = [*samples, *late, Sample(_END, step, 0.0, time=now)]
                continue
            if samples or not late:
                made.append(Moment(step, samples, now))
            if late:
                made += [Moment(step, part, now) for part in step_by_step(late)]
        if made:
            self._judged = made[-1].step
        return made

    def _hand_out(self, moments: Sequence[Moment]) -> None:
        """Samples have arrived as numbers: keep them, and show them to whoever wants that, step by step."""
        dispatch, counts = self._dispatch, self._engine.counts_steps
        if not dispatch.table.get("samples") and not dispatch.reports["samples"]:
            self._history.remember(chain.from_iterable(map(_SAMPLES, moments)))
            self.judged_at = moments[-1].now
            return
        for step, samples, at, _ in moments:
            if not samples and not counts:
                continue
            self.judged_at = at
            self._history.remember(samples)
            if samples and dispatch.table.get("samples"):
                self._shown(step, samples)
            for report in dispatch.reports["samples"]:  # as `dispatch.report` does, at one call less in every step
                try:
                    report.call(step, samples)
                except BaseException as error:
                    dispatch.failed(report.owner, "samples", step, error)

    def _judge(self, moments: Sequence[Moment], event: Event | None) -> None:
        """Hand out and judge a block, oldest first. What an action stops does not keep the others from being heard."""
        if not moments:
            return
        stop: StopTraining | None = None
        self._judging = True
        try:
            self._hand_out(moments)
            for result in self._engine.judge(moments):
                try:
                    self._found(result, event)
                except StopTraining as error:
                    stop = stop or error
        finally:
            self._judging = False
        if stop is not None:
            raise stop
        if self._engine.failures:
            raise self._engine.failures.pop()


def acted_upon(
    rules: Iterable[Cause], derived: Iterable[Derived], actions: Mapping[str, Action], gated: Collection[str] = ()
) -> frozenset[str]:
    """Metrics that a rule looks at which keeps single updates from being made, with what they are made of.

    :param gated: rules that a gate holds to their published bound: they need not be judged for that.
    """
    wanted: list[str] = []
    for rule in rules:
        known = (actions.get(spec.name) for spec in rule.actions)
        if rule.id not in gated and any(getattr(action, "per_update", False) for action in known):
            wanted.append(rule.selector.metric)
            wanted += [selector.metric for selector, _ in rule.condition.parts if selector is not None]
            wanted += [guard.metric for guard in rule.only_if]
    formulas = {formula.name: formula.inputs for formula in derived}
    found: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in found:
            found.add(name)
            wanted += formulas.get(name, ())
    return frozenset(found)


def _floats(samples: Iterable[Sample]) -> bool:
    return {float}.issuperset(map(type, map(_VALUE, samples)))


def _finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except Exception:  # no number at all: the mailbox leaves it out
        return True


def _comes_late(value: Any) -> bool:
    """Whether a value is on a device, or will be made of some that are."""
    if isinstance(value, float):
        return False
    device = getattr(value, "device", None)
    return hasattr(value, "on_device") if device is None else getattr(device, "type", "cpu") != "cpu"
