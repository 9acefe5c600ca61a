"""Gradients that an update applies and that are none of its own: of the last step, because nobody cleared them; of the last,
incomplete group of micro-batches of the epoch before; of a loss for which another optimizer has stepped already. And updates of fewer
micro-batches than the loss is divided by."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number, value_of
from healthcheck.device.sampling import ElementSampler, KeptSamplers, SampledRows
from healthcheck.device.tensors import GRADIENT, IS_NONE, evenly, is_tensor, on_host
from healthcheck.probes.graph import CROSS_ENTROPIES, DISTANCES, kind_of, past_neutral, saved, shape_of, source_of
from healthcheck.probes.labels import optimizer_labels, where_called, where_made
from healthcheck.probes.looks import LOOK_SELDOM, next_look
from healthcheck.probes.step_order import divisor_of

TENSORS = 16
"""Tensors looked at, spread over the optimizer's: zero_grad clears all or none."""


@dataclass(slots=True)
class GradientMarks:
    """Which tensors one optimizer's gradients were after an update, and how often each had been written.

    For loops that report their loss after the update, so that nothing is seen before the backward pass: torch's version
    counters prove what happened. A gradient that was cleared is another tensor afterwards (``set_to_none``), or was
    written once more than the backward pass writes it. One that was not is the same tensor, written by the backward pass
    alone.
    """

    step: int
    optimizer: Callable[[], Any]
    marks: list[tuple[Callable[[], Any], Callable[[], Any], int]]

    @classmethod
    def after(cls, event: Event, params: Iterable[Any]) -> GradientMarks | None:
        """Note the gradients of ``params`` after the update of ``event``; None where versions prove nothing.

        A loss scale is taken out of the gradients in place, by some scalers and not by others.
        """
        import torch

        if event.loss_scale is not None:
            return None
        marks = [(weak(p), weak(p.grad), p.grad._version) for p in params if type(p.grad) is torch.Tensor]
        return cls(event.step, weak(event.optimizer), marks) if marks else None

    def held(self, event: Event) -> tuple[int, int] | None:
        """How many still hold the old gradient before the next update, of how many; None if that is unknown.

        Counted are those written once since, or twice where the loop clips: with several micro-batches that
        finds nothing, and never what is not there.
        """
        if event.optimizer is not self.optimizer() or event.step != self.step + 1 or event.loss_scale is not None:
            return None
        # The backward pass writes once, clipping once more.
        writes = 1 if event.max_norm is None else 2
        held = 0
        for parameter, gradient, version in self.marks:
            now = getattr(parameter(), "grad", None)
            held += now is not None and now is gradient() and now._version - version == writes
        return held, len(self.marks)


@dataclass(slots=True)
class _Left:
    """Gradients as one optimizer's update left them, and what became of each since."""

    optimizer: Callable[[], Any]
    sampler: ElementSampler
    fingerprint: list[SampledRows]
    gradients: list[Callable[[], Any]]
    """Ways to the gradients themselves, in the order of the sampler's parameters."""
    still: list[Any]
    """Per group: which rows have held at least the old gradient at every loss since."""
    seen_loss: bool = False
    cleared: bool = False
    """Set once all of them were seen to be None: nothing more to compare."""


class LeftoverProbe:
    """Compares gradients just before each backward pass with those that the last update used.

    Between two updates of an optimizer, correct loops show a cleared gradient (None or zeros)
    before at least one backward pass. Gradients are left over if the first pass meets exactly the
    old values, no later one meets a cleared gradient, and nobody has put other tensors in their
    place. That holds with several micro-batches, with ``set_to_none`` either way, wherever the loop calls
    ``zero_grad``, and for several optimizers that clear at different times.

    A loop that reports its loss after the update shows no moment before the backward pass; see
    :class:`GradientMarks`.
    """

    name = "leftover-gradients"
    rests_for_all = True
    stretchable = ("grads.leftover",)
    """Metrics that the overhead budget may have measured less often."""
    listens_to: tuple[EventKind, ...] = (
        EventKind.LOSS,
        EventKind.BEFORE_UPDATE,
        EventKind.AFTER_UPDATE,
        EventKind.STEP_END,
    )
    only_when_due = (EventKind.AFTER_UPDATE,)
    steps_ahead = 1
    """Gradients are noted in the step before."""
    provides: tuple[Metric, ...] = (
        Metric(
            "grads.leftover",
            "Share of the sampled tensors whose gradient still held the last step's values.",
            "fraction",
            Cost.DEVICE,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._samplers = KeptSamplers()
        """Of each optimizer, as long as it lives: it holds the same parameters."""
        self._left: dict[int, _Left] = {}
        self._marks: dict[int, GradientMarks] = {}
        self._loss_seen = -1
        """Step of the last loss."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.LOSS:
            self._loss_seen = event.step
            for kept in self._left.values():
                self._look(kept)
            return ()
        if event.kind is EventKind.AFTER_UPDATE:
            if demand.due("grads.leftover", event.step + 1) and event.optimizer is not None and not event.skipped:
                self._remember(event)  # judged there
            return ()
        if event.kind is EventKind.STEP_END:
            if event.skipped:  # nobody may clear after an update that never was
                self._left.pop(event.optimizer_index, None)
            if not self._left and not self._marks:
                self.rests_until = demand.next_due(("grads.leftover",), event.step + 1) - 1
            return ()
        marks = self._marks.pop(event.optimizer_index, None)
        if marks is not None:
            return self._count(event, marks)
        if not self._left:
            return ()
        # A replaced optimizer never steps again; what we hold of it must not live on.
        self._left = {k: kept for k, kept in self._left.items() if kept.optimizer() is not None}
        left: _Left | None = self._left.pop(event.optimizer_index, None)
        if left is None or not left.seen_loss or left.optimizer() is not event.optimizer:
            return ()
        return self._judge(event, left)

    def _remember(self, event: Event) -> None:
        import torch

        params = [p for group in event.optimizer.param_groups for p in group["params"] if p.grad is not None]
        params = [p for p in params if p.grad.layout is torch.strided]
        looked_at = list(evenly(params, TENSORS))
        if self._loss_seen != event.step:  # the loss is reported after the update
            marks = GradientMarks.after(event, looked_at)
            if marks is not None:
                self._marks[event.optimizer_index] = marks
            return
        sampler = self._samplers.of(event.optimizer, looked_at)
        fingerprint = sampler.gradients()
        still = list(map(_proves_something, fingerprint))
        gradients: list[Callable[[], Any]] = list(map(weakref.ref, map(GRADIENT, sampler.params)))
        self._left[event.optimizer_index] = _Left(weak(event.optimizer), sampler, fingerprint, gradients, still)

    @staticmethod
    def _count(event: Event, marks: GradientMarks) -> Iterable[Sample]:
        found = marks.held(event)
        if found is None:
            return ()
        held, asked = found
        facts = {"tensors": f"{held:,} of {asked:,} sampled tensors were not cleared since the last update"}
        facts |= where_called(event, "backward")
        labels = optimizer_labels(event.optimizer_index)
        return (Sample("grads.leftover", event.step, held / asked, labels, detail=lambda: facts),)

    @staticmethod
    def _look(left: _Left) -> None:
        first, left.seen_loss = not left.seen_loss, True
        if left.cleared:
            return
        if all(map(IS_NONE, map(GRADIENT, left.sampler.params))):
            left.cleared = True
            left.still = [flags & False for flags in left.still]
            return
        # At the first loss since the update exactly the old values, at later ones at least not zero: micro-batches add to them.
        for k, (old, now) in enumerate(zip(left.fingerprint, left.sampler.gradients("now"), strict=True)):
            held = (now.values == old.values).all(1) if first else (now.values != 0).any(1)
            left.still[k] = left.still[k] & held

    @staticmethod
    def _judge(event: Event, left: _Left) -> Iterable[Sample]:
        import torch

        labels = optimizer_labels(event.optimizer_index)
        usable = list(map(_proves_something, left.fingerprint))
        if not usable:
            return (Sample("grads.leftover", event.step, 0.0, labels),)
        home = usable[0].device
        asked = number(torch.stack([rows.sum().to(home) for rows in usable]).sum())
        # Without an old gradient that may have been added to, nothing was left over, whatever values look like.
        held: Any = 0.0
        if _some_added_to(left.sampler.params, left.gradients):
            held = number(torch.stack([rows.sum().to(home) for rows in left.still]).sum())
        share = calculate(_share, held, asked)

        place = where_called(event, "backward")

        def facts() -> Mapping[str, Any]:
            counts = f"{value_of(held):,.0f} of {value_of(asked):,.0f}"
            return {"tensors": f"{counts} sampled tensors held the last step's gradient"} | place

        return () if share is None else (Sample("grads.leftover", event.step, share, labels, detail=facts),)


def _proves_something(rows: SampledRows) -> Any:
    """Which rows hold a number that is not zero and none that is not finite: the others may look the same by chance."""
    return (rows.values != 0).any(1) & rows.values.isfinite().all(1)


def _share(held: float, asked: float) -> float | None:
    return held / asked if asked else None


def _some_added_to(params: Sequence[Any], old: Sequence[Callable[[], Any]]) -> bool:
    """Whether what some parameter has now may be its old gradient with a new one on top.

    A backward pass adds in place, unless it makes a graph of the gradient. A script that sets ``p.grad`` by itself (from
    half-precision weights, from gradients of several losses) has left nothing over, though it clears nothing.
    """
    for parameter, known in zip(params, old, strict=True):
        now = parameter.grad
        if now is not None and (now is known() or now.requires_grad):
            return True
    return False


# --------------------------------------------------------------------------------------------------
# Of another group of micro-batches, or of another loss.


ALIKE = 3
"""Updates in a row with as many backward passes each, after which a larger number is an exception."""
ALONE = 20
"""Updates with one backward pass each after which a run accumulates nothing."""


class IncompleteGroupProbe:
    """Counts the backward passes of each update, where gradients are accumulated.

    With a number of batches that the number of micro-batches does not divide, the last ones of an epoch make no update.
    Gradients that are not cleared then are added to the first update of the next epoch, which so has more passes than all
    others: again and again as many more, after as many updates. That nobody has cleared them in between is proved by
    torch's version counter of a gradient. It must be seen that groups of so many are meant: each loss is divided by their number, or
    each pass took a batch from a loader that began anew within the exceptional update. Who collects rows or tokens until there are
    enough has larger groups now and then, and nothing left over.
    """

    name = "incomplete-groups"
    rests_always = True
    listens_to: tuple[EventKind, ...] = (EventKind.BATCH_READY, EventKind.LOSS, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "updates.carried",
            "Updates so far to which the passes of an incomplete group before were added, each as many after as many updates.",
            cost=Cost.HOST,
            needs=("gradient accumulation",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._passes = self._batches = 0
        self._divisors: set[float] = set()
        """What the losses of the update at hand are divided by."""
        self._began = False
        """Whether a pass over the data began within it."""
        self._usual = (0, 0)
        """Passes of each of the last updates, and how many in a row had so many."""
        self._offset: int | None = None
        """How often the gradient was written in each of them, less their passes."""
        self._gradient: Callable[[], Any] = lambda: None
        self._version = 0
        self._updates = 0
        self._found: list[tuple[int, int]] = []
        """Of each update with more passes: its number, and how many more."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.BATCH_READY:
            if event.phase == "train":
                self._batches += 1
                self._began = self._began or event.begins_pass
            return ()
        if event.kind is EventKind.LOSS:
            self._passes += 1
            if event.loss_graph is not None:
                self._divisors.add(round(divisor_of(event.loss_graph), 3))
            return ()
        if event.optimizer is None or event.optimizer_index > 0 or self._updates < 0:
            return ()
        if event.loss_scale is not None or (event.model is not None and len(event.model.optimizers()) > 1):
            self._updates, self.rests_until = -1, sys.maxsize  # scalers write gradients as they like
            return ()
        return self._judge(event)

    def _judge(self, event: Event) -> Iterable[Sample]:
        usual, row = self._usual
        passes = self._passes
        meant = self._divisors == {float(usual)} or (self._began and self._batches == passes)
        self._passes = self._batches = 0
        self._divisors, self._began = set(), False
        self._updates += 1
        written = self._written(event.optimizer)
        if passes == usual:
            self._usual = usual, row + 1
            if written is not None:
                self._offset = written - passes
            if usual == 1 and row >= ALONE:
                self.rests_until = next_look(event.step, LOOK_SELDOM)
            return (Sample("updates.carried", event.step, float(self._count())),) if usual > 1 else ()
        settled = row >= ALIKE and usual > 1
        if not settled or not meant or written is None or not usual < passes < 2 * usual:
            # Smaller groups are how most loops end an epoch: the usual number stays the same.
            if not settled or passes > usual:
                self._usual, self._found = (passes, 1), []
            return ()
        if self._offset is None or written - passes != self._offset:
            return ()  # somebody cleared them
        self._found.append((self._updates, passes - usual))
        carried = self._count()
        facts = {"passes": f"{passes} backward passes in this update, {usual} in those before"}
        facts |= where_called(event, "backward")
        return (Sample("updates.carried", event.step, float(carried), detail=lambda: facts),)

    def _count(self) -> int:
        """The last exceptions that were alike: as many passes more, after as many updates."""
        found = self._found
        if len(found) < 2:
            return len(found)
        extra, gap, alike = found[-1][1], found[-1][0] - found[-2][0], 2
        for at in range(len(found) - 2, 0, -1):
            if found[at][1] != extra or found[at][0] - found[at - 1][0] != gap:
                break
            alike += 1
        return alike if found[-2][1] == extra else 1

    def _written(self, optimizer: Any) -> int | None:
        """How often the gradient looked at was written since the last update, but for an offset; None if unknown."""
        gradient = next((p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None), None)
        if gradient is None:
            return None
        known, before = self._gradient() is gradient, self._version
        self._gradient, self._version = weakref.ref(gradient), int(gradient._version)
        return self._version - before if known else self._version


SHARES = range(3, 65)
"""Micro-batches for which a loss may be divided: by 2 it is halved for other reasons as well."""
FIRST_PASSES = 60
"""Backward passes of a run in which its updates are compared with what the loss is divided by."""
MEANS = (*CROSS_ENTROPIES, *DISTANCES, "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits")


class LossShareProbe:
    """Compares the number that each loss is divided by with the backward passes of an update.

    Who adds up gradients of n micro-batches divides each loss by n. Where no update of the first passes has more than half as many,
    the condition in front of ``step()`` is missing, the wrong way round, or stands around the wrong lines. Only a mean over
    rows counts that torch has taken itself and that is divided by a whole number which is no size of its input, and only where something else shows that
    micro-batches are meant: updates of different numbers of passes, or a clipping that comes in some of the updates only.
    """

    name = "loss-shares"
    rests_for_all = True
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "updates.of_few_passes",
            "Number that each loss is divided by, if updates are made after half as many backward passes or fewer; else 0.",
            cost=Cost.HOST,
            needs=("the graph of the loss", "a loss that is divided"),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._shares: Counter[float] = Counter()
        self._passes = 0
        """Of the update at hand."""
        self._updates: list[tuple[int, bool]] = []
        """Passes of each update, and whether it was clipped."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if self.rests_until > event.step or event.optimizer_index > 0:
            return ()
        if event.kind is EventKind.LOSS:
            if event.phase == "train" and event.loss_graph is not None:
                self._passes += 1
                self._shares[share_of(event.loss_graph)] += 1
                if self._shares[0] > 1:  # it is not divided
                    self.rests_until = sys.maxsize
            return ()
        self._updates.append((self._passes, event.max_norm is not None))
        self._passes = 0
        if self._shares.total() < FIRST_PASSES:
            return ()
        self.rests_until = sys.maxsize
        several = event.model is not None and len(event.model.optimizers()) > 1
        world = event.run.world_size if event.run is not None else 1
        (number, count), *_ = self._shares.most_common(1)
        numbers, clipped = [passes for passes, _ in self._updates], [clip for _, clip in self._updates]
        most = max(numbers)
        meant = len(set(numbers)) > 1 or 1 < sum(clipped) <= len(clipped) / 2
        few = meant and not several and number != world and 2 * most <= number and count >= 0.9 * self._shares.total()
        least = min(numbers)
        facts = {"passes": f"{most} in each update" if least == most else f"{least} to {most} in an update"}
        facts |= where_called(event, "backward")
        detail = (lambda: facts) if few else None
        return (Sample("updates.of_few_passes", event.step, float(number if few else 0), detail=detail),)


def share_of(root: Any) -> float:
    """The whole number that the mean of a loss is divided by; 0 where it is not, or where that may be another mean."""
    number = divisor_of(root)
    if number not in SHARES:
        return 0.0
    node = root
    while kind_of(node) in ("Div", "Mul"):
        node = source_of(node)
    node = past_neutral(node)
    if kind_of(node) not in MEANS or int(getattr(node, "_saved_reduction", 0)) != 1:
        return 0.0
    target: Any = saved(node, "target")
    sizes = {*shape_of(source_of(node)), *(target.shape if is_tensor(target) else ())}
    return 0.0 if number in sizes else number


REST = 50
"""Steps between two looks for a second optimizer."""
LOOKED_AT = 16
"""Tensors looked at, spread over the optimizer's."""
MOST = 0.9
"""Share of the tensors with a gradient that had one before, from which on the other loss went through the same network."""


@dataclass(slots=True)
class _Window:
    """What is known of one optimizer since its last update."""

    held: Any = None
    """Whether gradients were there at the last backward pass, after another optimizer had stepped: a bool or a tensor."""
    looked_at: int = 0
    """How many of the tensors had one then."""
    passes: int = 0


@dataclass(slots=True)
class _Pending:
    """A finding that waits for the next backward pass: no other optimizer may step until then."""

    index: int
    sample: Sample


class OtherLossProbe:
    """Looks, where several optimizers take turns, for gradients that a loss of one of them has left in another's.

    The generator's loss goes through the discriminator and leaves gradients there. Where these are not cleared before the
    discriminator's own backward pass, its optimizer applies both, and the first of them has the wrong sign. Found where
    one optimizer has stepped after a backward pass, gradients of it are still there at the next pass, and only the other
    optimizer steps after that. An optimizer that steps more rarely than the other accumulates on purpose: the other one
    steps after each pass, the last included.
    """

    name = "other-loss"
    rests_for_all = True
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE)
    provides: tuple[Metric, ...] = (
        Metric(
            "grads.of_other_loss",
            "1 if an update applies gradients of a loss for which another optimizer has stepped already, else 0.",
            cost=Cost.DEVICE,
            needs=("several optimizers",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._windows: dict[int, _Window] = {}
        self._stepped: set[int] = set()
        """Optimizers that have stepped since the last backward pass."""
        self._pending: list[_Pending] = []
        self._looked: dict[int, list[Callable[[], Any]]] = {}
        self._updates: dict[int, tuple[int, int]] = {}
        """By optimizer: the step of its last update, and the most steps from one to the next."""
        self._seen = 0
        """The last step of which anything was seen."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None:
            return ()
        optimizers = len(event.model.optimizers())
        if optimizers < 2:  # a new one ends the rest
            self.rests_until = next_look(event.step, REST, LOOK_SELDOM)
            return ()
        if event.step > self._seen + 1:  # what went on during a rest is not known
            self._windows.clear()
            self._stepped.clear()
            self._updates = {index: (0, most) for index, (_, most) in self._updates.items()}
        self._seen = event.step
        if event.kind is EventKind.LOSS:
            return self._pass_begins(event, demand, optimizers)
        if event.optimizer is not None:
            self._update(event, demand)
        return ()

    def _pass_begins(self, event: Event, demand: Demand, optimizers: int) -> Iterable[Sample]:
        stepped, self._stepped = self._stepped, set()
        pending, self._pending = self._pending, []
        due = demand.due("grads.of_other_loss", event.step) or demand.due("grads.of_other_loss", event.step + 1)
        for index, window in self._windows.items():
            window.passes += 1
            if due and window.passes > 1 and stepped - {index}:
                window.held, window.looked_at = _there(self._looked.get(index, ()))
        # To judge an update the one before it must have been seen, of that optimizer.
        gaps = [most for _, most in self._updates.values()]
        if len(gaps) >= optimizers and all(gaps):
            ahead = max(gaps) + 1
            coming = demand.next_due(("grads.of_other_loss",), event.step - 1) - ahead
            if coming > event.step:
                self.rests_until = coming
        return [item.sample for item in pending if stepped == {item.index}]

    def _update(self, event: Event, demand: Demand) -> None:
        index, optimizer = event.optimizer_index, event.optimizer
        self._stepped.add(index)
        before, most = self._updates.get(index, (0, 0))
        self._updates[index] = event.step, max(most, event.step - before if before else 0)
        window, self._windows[index] = self._windows.get(index), _Window()
        if index not in self._looked:
            params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self._looked[index] = [weakref.ref(p) for p in evenly(params, LOOKED_AT)]
        if window is None or not demand.due("grads.of_other_loss", event.step):
            return
        now = [p for ref in self._looked[index] if (p := ref()) is not None and p.grad is not None]
        held: Any = False
        if window.held is not None and now and window.looked_at >= MOST * len(now):
            held = window.held
        value = float(held) if type(held) is bool else number(held)
        facts = {"passes": f"{window.passes} backward passes went into this update"}
        facts |= where_made(event, optimizer, "zero_grad") or where_called(event, "zero_grad")
        labels = optimizer_labels(index)
        sample = Sample("grads.of_other_loss", event.step, value, labels, detail=lambda: facts)
        self._pending.append(_Pending(index, sample))


def _there(looked: Sequence[Callable[[], Any]]) -> tuple[Any, int]:
    """Whether some gradient of these tensors is not zero, and how many there are."""
    import torch

    gradients = [p.grad for ref in looked if (p := ref()) is not None and p.grad is not None]
    gradients = [g for g in gradients if g.layout is torch.strided]
    if not gradients:
        return False, 0
    few = sorted(gradients, key=lambda g: int(g.numel()))[:4]
    if all(map(on_host, few)):
        return any(bool(g.any()) for g in few), len(gradients)
    return torch.stack([g.any() for g in few]).any(), len(gradients)
