"""The order of backward pass, update and ``zero_grad``: gradients that are lost before they are used, used twice, or
not shared between the ranks that train one model."""

from __future__ import annotations

import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.rows import StepRow, Update
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Labels, Metric, Sample
from healthcheck.device.tensors import is_tensor, on_host
from healthcheck.probes.graph import kind_of, saved, source_of
from healthcheck.probes.labels import optimizer_labels, where_called
from healthcheck.probes.looks import PAUSE
from healthcheck.rulelang.rule import SETTLED

TENSORS = 4
"""Tensors looked at, the smallest of the optimizer's: zero_grad clears all or none."""
UPDATES = 20
"""Updates over which reused gradients are counted."""
_SIZE = operator.methodcaller("numel")


@dataclass(slots=True)
class _Order:
    """What is known of one optimizer between two of its updates."""

    losses: int = 0
    """Backward passes of the run when it last made an update."""
    gradient: Callable[[], Any] = lambda: None
    version: int = -1
    reused: deque[bool] = field(default_factory=lambda: deque(maxlen=UPDATES))
    armed: list[Any] = field(default_factory=list)
    """Handles of the hooks that wait for the next backward pass."""
    got: set[int] = field(default_factory=set)
    looked_at: int = 0


class StepOrderProbe:
    """Two orders of calls that raise no error and train nothing, or something else.

    *Cleared*: the backward pass made gradients and the update found none, because ``zero_grad`` stands between them
    or the update before the backward pass. Suspected where an update meets no gradient at all (or, on the host, only
    zeros in the tensors looked at); then hooks on a few parameters watch one backward pass, and are removed.

    *Reused*: an update without a backward pass since the optimizer's last one, with the very same gradients, which
    torch's version counters prove without a look at them. Gradients that a script writes itself are none. In a run that has
    settled without any, these are looked at again once an update had no pass.
    """

    name = "step-order"
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS, EventKind.BEFORE_UPDATE)
    noted = (EventKind.LOSS,)
    provides: tuple[Metric, ...] = (
        Metric(
            "grads.cleared",
            "Share of the sampled tensors whose gradient existed after the backward pass and was gone at the update.",
            "fraction",
            Cost.HOST,
        ),
        Metric(
            "updates.reused",
            f"Part of the last {UPDATES} updates that applied the gradients of the update before again.",
            "fraction",
            Cost.HOST,
        ),
    )

    def __init__(self) -> None:
        self.events_from = 0
        """Step from which on an optimizer is to be seen, where steps are noted in rows."""
        self.looks_from = 0
        """The same for gradients of updates: in a run in which each has had a pass of its own, rows say so if one has none."""
        self._losses = 0
        self._orders: dict[int, _Order] = {}

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.LOSS:
            self._losses += 1
            return ()
        if event.optimizer is None:
            return ()
        order = self._orders.get(event.optimizer_index)
        if order is None:
            order = self._orders[event.optimizer_index] = _Order()
        labels, step = optimizer_labels(event.optimizer_index), event.step
        samples: list[Sample] = []
        if event.row is None:
            row, model = StepRow(step, event.optimizer_index), cast(Any, event.model)  # nobody looks at it
            self.look(row, Update(model, demand, event.optimizer, event.optimizer_index))
            if row.found.get(self.name) is not None:
                samples.append(_reused(row.found[self.name], step, labels))
        else:
            self.events_from = demand.next_due(("grads.cleared",), step)
        if order.armed:
            samples += self._judge(order, event)
        elif "grads.cleared" in demand.due_now:
            # On a device the common case must be found without a look at values.
            if _is_there(event.optimizer):
                return [*samples, Sample("grads.cleared", step, 0.0, labels)]
            params = _trainable(event.optimizer)
            if params and _all_gone(params):
                self._arm(order, params)
                self.events_from = step + 1
            else:
                samples.append(Sample("grads.cleared", step, 0.0, labels))
        return samples

    def look(self, row: StepRow, update: Update) -> None:
        """The gradients of an update that is noted in a row."""
        if not update.final:
            return
        order = self._orders.get(row.optimizer_index)
        if order is None:
            order = self._orders[row.optimizer_index] = _Order()
        losses = self._losses = self._losses + len(row.passes)
        if not losses:
            return
        # Whether the update applies the gradients of the one before once more.
        gradient: Any = None
        for group in update.optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is not None:
                    break
            if gradient is not None:
                break
        reused = order.reused
        if gradient is None:
            order.losses, order.version = losses, -1
            reused.append(False)
        else:
            version, known = gradient._version, order.gradient() is gradient
            reused.append(known and order.losses == losses and order.version == version)
            order.losses, order.version = losses, version
            if not known:
                order.gradient = weakref.ref(gradient)
        row.found[self.name] = None
        if len(reused) == UPDATES:
            if "updates.reused" in update.demand.due_now:
                row.found[self.name] = sum(reused)
            if row.step >= SETTLED and not any(reused):
                orders = self._orders.values()
                calm = all(len(known.reused) == UPDATES and not any(known.reused) for known in orders)
                self.looks_from = row.step + PAUSE if calm else 0

    def sample_rows(self, rows: Sequence[StepRow], demand: Demand) -> Iterable[Sample]:
        made: list[Sample] = []
        every = demand.every_of("updates.reused") if demand.wants("updates.reused") else 0
        for row in rows:
            count = row.found.get(self.name)
            if row.seen and self.name not in row.found:  # nobody has looked
                self._losses += len(row.passes)
                if not row.passes and self.looks_from:
                    self.looks_from = 0
                    for order in self._orders.values():
                        order.reused.clear()  # of the next updates each is looked at
                known = row.step < self.looks_from and row.optimizer_index in self._orders
                if known and every and not row.step % every:
                    count = 0
            if count is not None:
                sample = _reused(count, row.step, optimizer_labels(row.optimizer_index))
                sample.time = row.update_time
                made.append(sample)
        return made

    def _arm(self, order: _Order, params: Sequence[Any]) -> None:
        few = sorted(params, key=_SIZE)[:TENSORS]
        order.got, order.looked_at = set(), len(few)

        def took(number: int) -> Callable[[Any], None]:
            def hook(parameter: Any) -> None:
                if not _is_gone(parameter.grad):
                    order.got.add(number)

            return hook

        # Removed again at the next update: one backward pass is enough to see whether gradients come.
        order.armed = [p.register_post_accumulate_grad_hook(took(n)) for n, p in enumerate(few) if p.is_leaf]

    def _judge(self, order: _Order, event: Event) -> Iterable[Sample]:
        self._disarm(order)
        lost = len(order.got) if _all_gone(_trainable(event.optimizer)) else 0
        looked = order.looked_at
        place = where_called(event, "zero_grad")

        def facts() -> Mapping[str, Any]:
            lose = f"{lost} of {looked} sampled tensors got a gradient in the backward pass and lost it"
            return {"tensors": lose} | place

        share = lost / looked
        return (Sample("grads.cleared", event.step, share, optimizer_labels(event.optimizer_index), detail=facts),)

    @staticmethod
    def _disarm(order: _Order) -> None:
        for handle in order.armed:
            handle.remove()
        order.armed = []

    def close(self) -> None:
        """Remove hooks that still wait."""
        for order in self._orders.values():
            self._disarm(order)


def _reused(count: int, step: int, labels: Labels) -> Sample:
    facts = {"updates": f"{count} of the last {UPDATES} updates had no backward pass of their own"}
    return Sample("updates.reused", step, count / UPDATES, labels, detail=lambda: facts)


def _trainable(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()]


def _is_there(optimizer: Any) -> bool:
    """Whether the first parameter that is trained has a gradient on a device, which then counts as some."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.numel():
                gradient = parameter.grad
                return gradient is not None and not on_host(gradient)
    return False


def _all_gone(params: Sequence[Any]) -> bool:
    """Whether no parameter has a gradient, or the smallest ones, on the host, have zeros for theirs."""
    if params[0].grad is None:
        return all(p.grad is None for p in params)
    few = sorted(params, key=_SIZE)[:TENSORS]
    return all(p.grad is not None and _is_zero(p.grad) for p in few)


def _is_zero(gradient: Any) -> bool:
    """Exact, on the host; a gradient on a device counts as some: asking would be a wait."""
    import torch

    return on_host(gradient) and gradient.layout is torch.strided and not bool(gradient.any())


def _is_gone(gradient: Any) -> bool:
    """No gradient, or only zeros."""
    return gradient is None or _is_zero(gradient)


DISCARDED_TENSORS = 2
"""Tensors looked at, the smallest of the optimizer's."""


class DiscardedGradientProbe:
    """Watches one update in a while for backward passes that are thrown away.

    Between two backward passes of one update the gradients must still be there. That they are gone is no fault where
    the first pass serves something else (an adversarial example, the generator's pass through a discriminator), so that
    accumulation must be seen to be meant: the loss is divided by the number of its micro-batches, or each of them took
    a batch of its own from the loader.
    """

    name = "discarded-gradients"
    listens_to: tuple[EventKind, ...] = (EventKind.BATCH_READY, EventKind.LOSS, EventKind.BEFORE_UPDATE)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "grads.discarded",
            "Part of an update's backward passes whose gradients were cleared before the update.",
            "fraction",
            Cost.HOST,
        ),
    )

    def __init__(self) -> None:
        self._step = 0
        self._passes = self._batches = self._lost = 0
        self._fresh = False
        self._divided = False
        self._params: list[Callable[[], Any]] = []
        """The few tensors, from an update before that had several backward passes."""
        self._hooks: list[Any] = []

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.step != self._step:
            self._begin(event.step)
        if event.kind is EventKind.BATCH_READY:
            self._batches += event.phase == "train"
        elif event.kind is EventKind.LOSS:
            self._before_backward(event)
        elif event.optimizer is not None:
            return self._judge(event, demand)
        return ()

    def _begin(self, step: int) -> None:
        self._step = step
        self._passes = self._batches = self._lost = 0
        self._fresh = False
        self._divided = False
        self.close()

    def _before_backward(self, event: Event) -> None:
        params = [parameter for known in self._params if (parameter := known()) is not None]
        if self._passes == 0:
            self._hooks = [p.register_post_accumulate_grad_hook(self._took) for p in params if p.is_leaf]
        elif self._fresh and params and all(_is_gone(p.grad) for p in params):
            self._lost += 1
        self._fresh = False
        self._passes += 1
        if event.loss_graph is not None:
            self._divided = divisor_of(event.loss_graph) > 1

    def _took(self, parameter: Any) -> None:
        self._fresh = self._fresh or not _is_gone(parameter.grad)

    def _judge(self, event: Event, demand: Demand) -> Iterable[Sample]:
        passes, lost, hooked = self._passes, self._lost, bool(self._hooks)
        meant = self._divided or self._batches == passes
        self._begin(event.step)
        if not demand.due("grads.discarded", event.step) or event.optimizer_index > 0:
            return ()
        # No accumulation, so nothing that could have been thrown away.
        if passes < 2:
            self._params = []
            return (Sample("grads.discarded", event.step, 0.0),)
        owned = [p for group in event.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._params = [weak(p) for p in sorted(owned, key=lambda p: int(p.numel()))[:DISCARDED_TENSORS]]
        if not hooked:
            return ()
        place = where_called(event, "zero_grad")

        def facts() -> Mapping[str, Any]:
            return {"passes": f"{lost} of {passes} backward passes of this update were thrown away"} | place

        return (Sample("grads.discarded", event.step, lost / passes if meant else 0.0, detail=facts if lost else None),)

    def close(self) -> None:
        """Remove hooks that still wait."""
        while self._hooks:
            self._hooks.pop().remove()


def divisor_of(root: Any) -> float:
    """The number that a loss was divided by, directly or behind the scale of a GradScaler; 1 without one."""
    node = root
    for _ in range(3):
        kind = kind_of(node)
        number: Any = saved(node, "other") if kind in ("Div", "Mul") else None
        if not is_tensor(number) or number.numel() != 1 or not on_host(number):
            return 1.0
        value = float(number)
        if kind == "Div" and value > 1:
            return value
        if kind == "Mul" and 0 < value < 1:
            return 1 / value
        node = source_of(node)
    return 1.0


COUNTED_UPDATES = 5
"""Updates during which the wrapper's passes are counted."""


class UnsyncedGradientProbe:
    """Counts tensors of a DDP model that get gradients while the wrapper itself is never called.

    Gradients are averaged over the ranks in a backward pass that follows a pass through the wrapper. Who calls
    ``model.module(...)``, or a method of it, trains each rank on its own. Looked at once, over the first few updates; the
    hook on the wrapper is taken off then. A compiled model is not judged: torch passes by hooks that it has not compiled.
    """

    name = "unsynced"
    rests_always = True
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "grads.unsynced",
            f"Tensors of a DDP model with gradients that are not shared, after {COUNTED_UPDATES} updates without a pass through it.",
            cost=Cost.HOST,
            needs=("DistributedDataParallel on several ranks",),
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._passes = 0
        self._updates = 0
        self._handles: list[Any] = []

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or self.rests_until:
            return ()
        modules = [module for _, module in event.model.named_modules()]
        wrappers = [module for module in modules if _shares(module)]
        if not wrappers or any(map(_is_compiled, modules)):
            self.rests_until = sys.maxsize
            return ()
        self._updates += 1
        if self._updates == 1:
            self._handles = [wrapper.register_forward_pre_hook(self._passed) for wrapper in wrappers]
        if self._updates <= COUNTED_UPDATES:
            return ()
        self.close()
        self.rests_until = sys.maxsize
        alone = 0 if self._passes else sum(p.grad is not None for wrapper in wrappers for p in wrapper.parameters())
        facts = {"wrapper": f"not called in {COUNTED_UPDATES} updates"}
        return (Sample("grads.unsynced", event.step, float(alone), detail=lambda: facts),)

    def _passed(self, module: Any, given: Any) -> None:
        self._passes += 1

    def close(self) -> None:
        """Take the hooks off."""
        while self._handles:
            self._handles.pop().remove()


def _shares(module: Any) -> bool:
    """Whether this is DDP over several ranks. By name: a run on one rank need not import ``torch.distributed``."""
    if not any(cls.__name__ == "DistributedDataParallel" for cls in type(module).__mro__):
        return False
    group = getattr(module, "process_group", None)
    return group is not None and group.size() > 1


def _is_compiled(module: Any) -> bool:
    kinds = {cls.__name__ for cls in type(module).__mro__}
    return "OptimizedModule" in kinds or getattr(module, "_compiled_call_impl", None) is not None
