"""Optimizers that are never stepped, and schedulers that are not, or that move the rate of no optimizer that is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.living import living
from healthcheck.probes.optimizer.unstepped import UnsteppedSchedules
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Cost, Metric, Sample

LOOKS = (150, 1500)
"""Updates after which it is looked. Before the first, a stage of the training may be yet to come."""
STEPPED = 10
"""Steps from which on a scheduler counts as used."""
SHORT = 100
"""Half a cycle of a cosine with fewer updates is no plan for a training."""


class BystanderProbe:
    """Looks at the optimizers and schedulers that live beside those of the training, twice in a run.

    *Idle*: tensors that get gradients, one more after the look, and whose optimizer has never made a step, while another
    one makes one after another. *Elsewhere*: schedulers that are stepped and whose optimizer makes no step, while another one updates the
    same parameters: it was built anew after the scheduler. *Half cycles*: of a ``CosineAnnealingLR``, which rises again
    after ``T_max`` steps, where that are fewer than :data:`SHORT` and it is stepped per update. *Unstepped*: optimizers
    that make steps and whose schedulers make none (:class:`UnsteppedSchedules`).
    """

    name = "bystanders"
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
            f"Times that a CosineAnnealingLR has gone down or up, each within {SHORT} updates or fewer; else 0.",
            cost=Cost.HOST,
            needs=(f"{LOOKS[0]} updates",),
        ),
        Metric(
            "schedule.unstepped",
            "Optimizers that make steps while their schedulers, built and never stepped, would have had to move the rate.",
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
        around = living("Optimizer", "LRScheduler")
        idle = {id(p): p for optimizer in around for p in _idle(optimizer, held)}
        self._idle = [(weak(p), weak(p.grad), p.grad._version) for p in idle.values()]
        schedulers = [(s, _driven(s, stepping)) for s in around if hasattr(s, "last_epoch")]
        elsewhere = [s for s, optimizer in schedulers if _is_elsewhere(s, optimizer, stepping, held)]
        cycles = max(
            (n for s, optimizer in schedulers for n in _half_cycles(s, optimizer, stepping, made)), default=0.0
        )
        self._unstepped.look(schedulers, stepping, made, event)

        def which() -> Mapping[str, Any]:
            return {"which": ", ".join(sorted({type(s).__name__ for s in elsewhere}))}

        if not self._idle:
            yield Sample("optimizer.idle", event.step, 0.0)
        yield Sample("schedule.elsewhere", event.step, float(len(elsewhere)), detail=which)
        yield Sample("schedule.half_cycles", event.step, cycles)


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
