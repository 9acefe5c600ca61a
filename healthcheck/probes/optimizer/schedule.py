"""The learning rate against its own schedule, and optimizers that were silently replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from healthcheck.events import Event, EventKind
from healthcheck.probes.optimizer.learning_rate import largest_rate
from healthcheck.probes.values import on_host, optimizer_labels, scalar, spread
from healthcheck.probes.weights.sampling import ElementSampler, SampledRows
from healthcheck.protocols import Demand
from healthcheck.references import weak
from healthcheck.samples import Metric, Sample

SETTLED = 20
"""Updates after which an optimizer has a schedule of its own, and can be replaced."""
LOOK_EVERY = 10
"""Steps between two looks at an optimizer whose rate is its schedule's, and at the weights for :func:`_same_model`."""
LOOK_CLOSELY = 100
"""Updates after which a tenth of these looks is enough: weights move fastest at the start."""
TENSORS = 8
ALIKE = 0.5
"""Relative distance under which weights are the same model's, some steps apart."""
STRETCH = 500
"""Updates over which, or twice that, ``lr.fraction`` looks back."""
COURSES = 8
"""Optimizers remembered; inner loops make them by the thousand."""


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
        self.recent = (max(self.recent[0], rate), self.recent[1])
        self.before, self.rate = (self.rate if self.updates else rate), rate
        self.peak = max(self.peak, rate)
        self.updates += 1
        self.last_step = step


class ScheduleProbe:
    """Compares each learning rate with what went before.

    While the optimizer stays the same object, its scheduler may do as it likes: cycles, restarts
    and steps are its schedule. Without a scheduler, a rate above the highest so far that no steady
    warm-up explains is a jump. So is another rate of a new optimizer that takes over a model in
    the middle of its training: tensors of the same shapes, weights close to those that the old
    optimizer left, and not those it began with (which would be another fold or another seed). If
    the old one had state (momentum) and the new one has none, it has been *replaced*, unless its
    rate is a lower one of its own (a second stage of the training), or a framework was told to
    train once more.
    """

    name = "schedule"
    listens_to: tuple[EventKind, ...] = (EventKind.TRAIN_START, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric("lr.jump", "Learning rate divided by what its schedule so far predicts; 1 is as expected."),
        Metric(
            "lr.fraction",
            f"Learning rate under a scheduler, divided by its highest in the last {STRETCH} to {2 * STRETCH} updates.",
        ),
        Metric("optimizer.replaced", "1 when a new optimizer without state takes over a trained model, else 0."),
    )

    def __init__(self) -> None:
        self._courses: list[_Course] = []
        self._last: _Course | None = None
        self._resumed: float | None = None

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.TRAIN_START:  # a further `fit()` has optimizers of its own, on purpose
            self._courses.clear()
        optimizer = event.optimizer
        if optimizer is None:
            return ()
        rate = largest_rate(optimizer)
        if rate is None or not on_host(rate):
            return ()
        course = self._last
        if course is None or course.optimizer() is not optimizer:
            course = self._last = next((c for c in self._courses if c.optimizer() is optimizer), None)
        if course is not None:
            looks = event.step % LOOK_EVERY == 0 or "lr.fraction" in demand.due_now
            if not looks and (course.scheduled or rate == course.rate):
                course.add(rate, event.step)
                return ()
            course.had_state = course.had_state or len(optimizer.state) > 0
            if event.step % (LOOK_EVERY if course.updates < LOOK_CLOSELY else 10 * LOOK_EVERY) == 0:
                course.last_weights = _look(optimizer)
        return self._samples(event, demand, course, rate)

    def _samples(self, event: Event, demand: Demand, course: _Course | None, rate: float) -> list[Sample]:
        jump: Any = None
        replaced: Any = 0.0
        detail = None
        scheduled = _has_scheduler(event.optimizer)
        if course is None:
            course, jump, replaced, detail = self._begin(event, rate)
        elif course.updates >= SETTLED:
            jump = 1.0
            ceiling = max(course.peak, course.rate, 2 * course.rate - course.before)
            if rate > ceiling > 0 and not scheduled:
                jump = rate / ceiling
        labels = optimizer_labels(event.optimizer_index)
        samples = [Sample("optimizer.replaced", event.step, replaced, labels, detail=detail)]
        if jump is not None:
            samples.append(Sample("lr.jump", event.step, jump, labels, detail=detail))
        course.scheduled = scheduled
        course.add(rate, event.step)
        # Only what a scheduler of torch did: a rate that is cut when the loss stands still (ReduceLROnPlateau) ends low.
        if "lr.fraction" in demand.due_now and max(course.recent) > 0 and scheduled:
            samples.append(Sample("lr.fraction", event.step, rate / max(course.recent), labels))
        return samples

    def _begin(self, event: Event, rate: float) -> tuple[_Course, Any, Any, Any]:
        """The first update of an optimizer object: does it continue what another one began?"""
        optimizer = event.optimizer
        weights = _look(optimizer)
        new = _Course(weak(optimizer), _shapes(optimizer), type(optimizer), weights, weights, first=rate)
        old = self._predecessor(new, event.step)
        self._courses = [*self._courses[1 - COURSES :], new]
        self._last = new
        if old is None:
            jump = None
            if self._resumed is not None and event.optimizer_index == 0:
                jump = rate / self._resumed if self._resumed > 0 else None
                self._resumed = None
            return new, jump, 0.0, None
        import torch

        same = self._same_model(old, new)
        old.replaced = True
        expected = max(old.rate, 0.0)
        ratio = rate / expected if expected > 0 else 1.0
        jump = scalar(torch.where(same, torch.full_like(same, ratio, dtype=torch.float32), 1.0))
        # A restart takes the rate up where it was, begins the old schedule again, or jumps up; a lower rate of its
        # own is a further stage of the training, which begins with a clean optimizer on purpose.
        continued = rate > expected or any(abs(rate - known) <= 0.01 * known for known in (old.first, expected))
        lost_state = old.had_state and len(optimizer.state) == 0 and continued
        replaced = scalar(same.float()) if lost_state else 0.0
        facts = {"before": f"{expected:.3g}", "now": f"{rate:.3g}", "optimizer": "a new object, trained weights"}
        return new, jump, replaced, lambda: facts

    def _predecessor(self, new: _Course, step: int) -> _Course | None:
        """A settled optimizer of tensors of the same shapes that stepped until just now.

        And of the same class: SGD after Adam, or LBFGS to finish with, is a further stage of the training.
        """
        for old in reversed(self._courses):
            alike = old.shapes == new.shapes and old.kind is new.kind
            if alike and not old.replaced and old.updates >= SETTLED and step - old.last_step <= 2:
                return old
        return None

    @staticmethod
    def _same_model(old: _Course, new: _Course) -> Any:
        """0-dim boolean tensor: weights lie near the old ones' last, and are not their first."""
        import torch

        now = torch.cat([rows.values.flatten().float() for rows in new.first_weights])
        last = torch.cat([rows.values.flatten().float().to(now.device) for rows in old.last_weights])
        first = torch.cat([rows.values.flatten().float().to(now.device) for rows in old.first_weights])
        if not now.shape == last.shape == first.shape:
            return torch.zeros((), dtype=torch.bool)
        near = (now - last).norm() <= ALIKE * last.norm()
        return near & (now != first).any()

    def state_dict(self) -> dict[str, Any]:
        return {"rate": self._courses[0].rate} if self._courses else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._resumed = float(state["rate"]) if "rate" in state else None


def _look(optimizer: Any) -> list[SampledRows]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return ElementSampler(list(spread(params, TENSORS))).weights()


def _shapes(optimizer: Any) -> frozenset[Any]:
    return frozenset(Counter(tuple(p.shape) for g in optimizer.param_groups for p in g["params"]).items())


def _has_scheduler(optimizer: Any) -> bool:
    """Whether a torch scheduler drives it: they all mark the step that they wrap."""
    return bool(getattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched", False)) or any(
        "initial_lr" in group for group in optimizer.param_groups
    )
