"""When a probe looks again, and whether it is still the same model that it looks at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from healthcheck.core.events import Event
from healthcheck.core.protocols import Demand
from healthcheck.core.runinfo import weak
from healthcheck.rulelang.rule import SETTLED as RUN_SETTLED

SETTLED = 20
"""Steps in which a run may still show what it has: a scaler, batches, updates that are decided upon."""
LOOK_EVERY = 10
"""Steps between two looks afterwards."""
LOOK_SETTLED = 20
"""The same in a run that has settled, of a probe that has something to see all the time. What the packs' rules look at then is
looked at every 20 steps or in multiples of them: most steps are nobody's."""
LOOK_SELDOM = 100
"""The same, of a probe that has found nothing so far."""


def next_look(step: int, every: int = LOOK_EVERY, settled: int = 0) -> int:
    """The first multiple of ``every`` after ``step``: who looks now and then does so in the same steps, and the others
    need no events.

    :param settled: counts instead in a run that has settled; 0: nothing else does.
    """
    if settled and step >= RUN_SETTLED:
        every = settled
    return step - step % every + every


def ask_again(step: int) -> int:
    """``rests_until`` of a probe that found nothing at ``step``: no rest while the run is young, and a longer one once it has
    settled. What it has not shown by then it mostly never shows; a new optimizer ends every rest."""
    if step <= SETTLED:
        return step
    return next_look(step, LOOK_EVERY, LOOK_SELDOM)


def spread_over_ranks(value: Any) -> bool:
    """Whether what is calculated of a tensor may be exchanged between ranks: then all of them have to look in the same steps,
    whatever each has seen and when."""
    return not isinstance(value, float) and type(value).__name__ not in ("Tensor", "Parameter")


class CloserLooks:
    """What probes share that look where their metrics are due, and sooner while what they see is near what rules name.

    One begins with ``if not self.looks(event, demand, keys): return ()`` and ends with ``self.rest(demand, keys, calm=...)``,
    or with ``self.rest_long`` where there was nothing to see.
    """

    rests_for_all = True
    """One look a step, whose loss or memory it is."""
    closely = LOOK_EVERY
    """Steps between two looks while values are near: the first number of its rules' ``every``."""

    def __init__(self) -> None:
        self.rests_until = 0
        self._closer = False
        """Whether a look is wanted at each multiple of :attr:`closely`, due or not."""
        self._step = 0
        """Of the last look."""

    def looks(self, event: Event, demand: Demand, keys: Sequence[str]) -> bool:
        """Whether this is an event to look at, the first of its step; notes it.

        :param keys: demand keys of the metrics.
        """
        step = event.step
        if step < self.rests_until or step == self._step:
            return False
        if demand.next_due(keys, step - 1) != step and not (self._closer and not step % self.closely):
            self._until(demand, keys, step)
            return False
        self._step = step
        return True

    def rest(self, demand: Demand, keys: Sequence[str], *, calm: bool) -> None:
        """Until the next look.

        :param calm: what was seen is far from what rules name, or ranks have to look together (:func:`spread_over_ranks`).
        """
        self._closer = not calm
        self._until(demand, keys, self._step)

    def rest_long(self, demand: Demand, keys: Sequence[str]) -> None:
        """The same after a look at which there was nothing to see."""
        self._closer = False
        self.rests_until = max(ask_again(self._step), demand.next_due(keys, self._step))

    def _until(self, demand: Demand, keys: Sequence[str], step: int) -> None:
        due = demand.next_due(keys, step)
        self.rests_until = min(due, next_look(step, self.closely)) if self._closer else due


PAUSE = 1000
"""Steps of a rest: of a probe that has looked, or of one in a run that shows no graph."""


class GraphProbe:
    """What probes share that look at the graph of the loss in a few backward passes, and rest in between.

    One listens to ``EventKind.LOSS``, and there begins with ``if not self.due(event): return ()``. Passes of steps in which it
    rested are counted as many as those of the step before.
    """

    looks_at: Sequence[int] = ()
    """Numbers of the passes that are looked at, from 1."""
    rests_always = True
    """Passes are counted whosever they are."""

    def __init__(self) -> None:
        self._ahead = sorted(self.looks_at, reverse=True)
        self._passes = 0
        self._step = 0
        self._in_step = 0
        """Passes of the step ``_step`` so far."""
        self.rests_until = 0

    def due(self, event: Event) -> bool:
        """Whether this is a backward pass of the training that is looked at; counts it, and says until when to rest."""
        step = event.step
        if event.phase != "train":
            return False
        if event.loss_graph is None or not self._ahead:
            self.rests_until = step + PAUSE
            return False
        if step != self._step:
            self._passes += max(0, step - self._step - 1) * self._in_step
            self._step, self._in_step = step, 0
        self._passes += 1
        self._in_step += 1
        looks = self._passes >= self._ahead[-1]
        # More than one may have passed during a rest; they count as one look.
        while self._ahead and self._passes >= self._ahead[-1]:
            self._ahead.pop()
        left = (self._ahead[-1] - self._passes - 1) // self._in_step if self._ahead else PAUSE
        self.rests_until = step + 1 + left
        return looks


QUIET = 100
"""Steps without an update after which an optimizer is taken to have ended its training."""


class Lead:
    """Which optimizer is asked about what concerns the whole run: the first of those that still step.

    A script may keep the optimizer of one training while it makes another one.
    """

    def __init__(self) -> None:
        self._stepped: dict[int, int] = {}

    def of(self, event: Event) -> bool:
        """Whether this is an event of that optimizer. To be asked at each event that the probe is given."""
        own = event.optimizer_index
        self._stepped[own] = event.step
        return not own or all(step < event.step - QUIET for index, step in self._stepped.items() if index < own)


class Searches:
    """Steps after which the process is searched for what lives in it, some 20 ms each: early, and once more."""

    def __init__(self) -> None:
        self._ahead = [20, 200]

    @property
    def coming(self) -> int:
        """The step of the next one; ``sys.maxsize`` after the last."""
        return self._ahead[0] if self._ahead else sys.maxsize

    def due(self, step: int) -> bool:
        """Whether it is time for one; more than one that were missed count as one."""
        due = step >= self.coming
        while step >= self.coming:
            self._ahead.pop(0)
        return due


class SeenModules:
    """Recognises a list of named modules by its length, its first and its last module.

    A view may build a new list at every call, so the list itself says nothing.
    """

    def __init__(self) -> None:
        self._count = -1
        self._ends: tuple[Callable[[], Any], Callable[[], Any]] | None = None

    def changed(self, modules: Sequence[tuple[str, Any]]) -> bool:
        """True at the first look and after the model was replaced; notes the new one."""
        if len(modules) == self._count:
            if self._ends is None:
                return False
            first, last = self._ends
            if first() is modules[0][1] and last() is modules[-1][1]:
                return False
        self._count = len(modules)
        self._ends = (weak(modules[0][1]), weak(modules[-1][1])) if modules else None
        return True

    def forget(self) -> None:
        """The next look finds everything new."""
        self._count, self._ends = -1, None
