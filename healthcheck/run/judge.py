"""The judging points of a run: samples to the mailbox and back, then through the rules.

The way of one step stands here from top to bottom: what the probes yielded is posted, what has arrived is handed
out and judged, and what the rules say goes back to whoever owns the judge.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Action, Mailbox
from healthcheck.core.samples import Sample
from healthcheck.engine.columns import step_by_step
from healthcheck.engine.engine import NOTHING, Engine, Evaluation
from healthcheck.rulelang.rule import Derived, Rule

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
"""Events at which samples are judged. Before the update, so that it can still be held back."""

_METRIC = operator.attrgetter("metric")
_DRAINED_AT = frozenset({EventKind.CHECKPOINT_SAVED, EventKind.TRAIN_END})
"""Events that wait for the values of the device: nothing may be left unjudged behind them."""


class Gate(Protocol):
    """An adapter's way to hold back an update by the values that it would be made from."""

    alarmed: bool
    """True while an update is shown that may have to be held back: its samples cannot wait."""
    waits: bool
    """True while the update at hand can only be held back if the host waits for its values."""

    def see(self, samples: Sequence[Sample]) -> None:
        """The samples of the update at hand, before they leave for the host."""


class Judge:
    """Judges the samples of one run. Called at :data:`JUDGED_AT` by the training thread.

    :param acting: metrics by which a rule could still change the update at hand (see :func:`acted_upon`).
    :param arrived: called with step, active seconds and samples, as numbers, before they are judged.
    :param found: called with what the rules found and the event at which they did; None: silence, in another thread.
    """

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        *,
        acting: frozenset[str],
        arrived: Callable[[int, float, list[Sample]], None],
        found: Callable[[Evaluation, Event | None], None],
    ) -> None:
        self.waiting: list[Sample] = []
        """Samples that have not been posted yet: probes and scripts add to it, every judging point posts it."""
        self.gate: Gate | None = None
        """Set by an adapter once a rule may hold back updates."""
        self.exchange: Callable[[int], None] | None = None
        """With several ranks that decide together: called at the end of every step, after it has been judged."""
        self.rows: Callable[[int | None], list[Sample]] = lambda before: []
        """Samples of the steps that were noted in rows since it was called last (:meth:`ProbeBoard.take_rows`)."""
        self.due_step = 0
        """The step at whose end :meth:`block_over` is to be called, if no event comes before it."""
        self.due_time = math.inf
        """The same in seconds of active training."""
        self._engine = engine
        self._mailbox = mailbox
        self._acting = acting
        self._arrived = arrived
        self._found = found
        self._lock = threading.RLock()  # the watchdog judges silence from a thread of its own

    def __call__(self, event: Event, now: float) -> None:
        """Post the samples of this event, take what has arrived, judge it.

        One function, although it does three things: it runs twice in every step, and calls are what costs there.

        :param now: seconds of active training.
        """
        self._judge(event.kind, event.step, event, now)

    def block_over(self, step: int, now: float) -> None:
        """What the end of a step calls for which no event was built."""
        self._judge(EventKind.STEP_END, step, None, now)

    def _judge(self, kind: EventKind, step: int, event: Event | None, now: float) -> None:
        before_update, step_ends = kind is EventKind.BEFORE_UPDATE, kind is EventKind.STEP_END
        if self.exchange is None:
            self.due_step = step + 2 - (step % 2)
        if not before_update or getattr(self.gate, "alarmed", False):
            self.waiting += self.rows(getattr(self._mailbox, "oldest", None))
        gate, mailbox = self.gate, self._mailbox
        with self._lock:
            urgent = False
            waits = before_update and gate is not None and gate.waits
            if self.waiting:
                # Before the update only what a rule could act upon is worth a judgement of its own: without
                # anything of that kind all wait for the end of the step. Values of a device wait for it in any case,
                # so that they travel in one copy.
                here, late = self.waiting, list[Sample]()
                if before_update:
                    if gate is not None:
                        gate.see(here)
                    if not waits:
                        here = []
                        for sample in self.waiting:
                            value = sample.value
                            (late if type(value) is not float and _comes_late(value) else here).append(sample)
                    urgent = waits or not self._acting.isdisjoint(map(_METRIC, here))
                if urgent or not before_update:
                    self.waiting = late
                    mailbox.post(step, here)
            if (before_update or step_ends) and not urgent and self.exchange is None:
                # A judgement costs more to begin with than to go on with, and values of a device come late anyhow:
                # they are judged at the end of every second step, so at most two steps after their own. Where they
                # take longer than that, at every chance. Ranks that decide together judge every step, all alike.
                oldest = None if waits else getattr(mailbox, "oldest", None)
                if oldest is not None and oldest >= step - 1 and (before_update or step % 2 == 1):
                    return
            ready = mailbox.drain() if waits or kind in _DRAINED_AT else mailbox.ready()
            if ready:
                self._arrived(step, now, ready)
            if ready or step_ends:  # rules that count steps without a sample are judged at the end of each
                for samples in step_by_step(ready):
                    result = self._engine.evaluate(step, samples, now)
                    if result is not NOTHING:
                        self._found(result, event)
            if step_ends and self.exchange is not None:
                self.exchange(step)

    def silence(self, seconds: float, now: float) -> None:
        """Judge ``stale`` rules from the watchdog's thread.

        Gives up after a second: a main thread that holds the lock for longer is judging, so it does not hang.

        :param seconds: for how long nothing has happened.
        :param now: seconds of active training.
        """
        if not self._lock.acquire(timeout=1.0):
            return
        try:
            result = self._engine.tick(seconds, now)
            if result:
                self._found(result, None)
        finally:
            self._lock.release()


def acted_upon(rules: Iterable[Rule], derived: Iterable[Derived], actions: Mapping[str, Action]) -> frozenset[str]:
    """Metrics that a rule looks at whose action changes the run or asks to come before the update, with what
    they are made of.
    """
    wanted: list[str] = []
    for rule in rules:
        known = (actions.get(spec.name) for spec in rule.actions)
        if any(a is not None and (a.stage != "observe" or getattr(a, "before_update", False)) for a in known):
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


def _comes_late(value: Any) -> bool:
    """Whether a value is on a device, or will be made of some that are."""
    if isinstance(value, float):
        return False
    device = getattr(value, "device", None)
    return hasattr(value, "on_device") if device is None else getattr(device, "type", "cpu") != "cpu"
