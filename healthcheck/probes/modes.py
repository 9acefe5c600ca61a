"""Train and eval mode: layers left in eval mode while they are trained, from the start or since an evaluation, and
evaluations that run in train mode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.runinfo import weak
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.living import live_objects
from healthcheck.device.tensors import on_host
from healthcheck.probes.labels import first_few, where_called, where_in_model
from healthcheck.probes.looks import SeenModules, ask_again


@dataclass(slots=True)
class _Part:
    name: str
    module: Any
    parent: Any
    """The module that holds it, or None for a root."""
    trained: bool = False
    """Whether a training pass met it in train mode before."""


class ModeProbe:
    """Looks at the modules that behave differently in eval mode: dropout, normalisation, RNN dropout.

    Counted are those in eval mode during a training pass that were in train mode in an earlier
    one, whose parent is in eval mode with them and trains something. A forgotten ``model.train()``
    after an evaluation looks like this. Not counted: backbones that were never in train mode or
    have nothing to train, and layers switched one by one on purpose (their parent still trains).
    """

    name = "modes"
    listens_to: tuple[EventKind, ...] = (
        EventKind.TRAIN_START,
        EventKind.LOSS,
        EventKind.BEFORE_UPDATE,
        EventKind.STEP_END,
    )
    only_when_due = listens_to[1:]
    provides: tuple[Metric, ...] = (
        Metric(
            "modules.in_eval",
            "Dropout and normalisation layers left in eval mode in a training pass.",
            cost=Cost.HOST,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._modules = SeenModules()
        self._parts: list[_Part] = []
        self._hit: list[_Part] | None = None
        self._hit_of_others = False
        """Whether those are of models that no optimizer of this step has."""
        self._given = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.kind is EventKind.TRAIN_START:
            # The first evaluation, after which train() is forgotten, may come before the first look that is due.
            if _is_under_way(event):
                self._look(event)
                self._hit = None
            return ()
        if event.kind is EventKind.LOSS:
            if event.phase == "train" and event.model is not None and demand.due("modules.in_eval", event.step):
                self._look(event)
                if not self._parts:
                    self.rests_until = max(ask_again(event.step), demand.next_due(("modules.in_eval",), event.step))
            return ()
        if self._hit is None or self._given == event.step:
            return ()
        if event.model is not None and self._modules.changed(event.model.named_modules()):
            # Another model trains by now; what was seen at the loss was its predecessor.
            self._rebuild(event.model.named_modules())
            self._hit = None
            return ()
        hit = self._hit
        if event.kind is EventKind.BEFORE_UPDATE and event.optimizer is not None:
            # A model that was trained before and only serves by now, a teacher, is rightly in eval mode.
            held = {id(p) for group in event.optimizer.param_groups for p in group["params"]}
            hit = [part for part in hit if _is_held(part, held)]
            if self._hit and not hit:
                self._hit_of_others = True
                return ()
        elif self._hit_of_others:
            hit = []
        self._hit, self._given, self._hit_of_others = None, event.step, False
        total = len(self._parts)
        place = where_called(event, "eval")

        def facts() -> Mapping[str, Any]:
            modules = f"{len(hit):,} of {total:,} such layers"
            return {"which": first_few(p.name for p in hit), "modules": modules} | place

        return (Sample("modules.in_eval", event.step, float(len(hit)), detail=facts),)

    def _look(self, event: Event) -> None:
        assert event.model is not None
        modules = event.model.named_modules()
        if self._modules.changed(modules):
            self._rebuild(modules)
        hit = []
        for part in self._parts:
            if part.module.training:
                part.trained = True
            elif part.trained and (part.parent is None or not part.parent.training) and _trains(part):
                hit.append(part)
        self._hit = hit

    def _rebuild(self, modules: Sequence[tuple[str, Any]]) -> None:
        # A layer that was met in train mode stays known when the rest of the model is rebuilt.
        before = [p.module for p in self._parts if p.trained]
        self._parts = list(sensitive_parts(modules))
        for part in self._parts:
            part.trained = any(part.module is module for module in before)


def _is_under_way(event: Event) -> bool:
    """Whether training begins with a forward pass made: a framework, which knows how many steps are to come, says so
    before the first, and modes may be set after that."""
    return event.model is not None and event.max_steps is None


def sensitive_parts(modules: Iterable[tuple[str, Any]]) -> Iterable[_Part]:
    """Modules whose forward depends on the mode, each with the module that holds it."""
    from torch import nn
    from torch.nn.modules.batchnorm import _NormBase
    from torch.nn.modules.dropout import _DropoutNd

    modules = list(modules)
    parents = {id(child): parent for _, parent in modules for child in parent.children()}
    for name, module in modules:
        if isinstance(module, _NormBase):
            sensitive = bool(module.track_running_stats)
        elif isinstance(module, _DropoutNd):
            sensitive = module.p > 0
        elif isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            sensitive = module.dropout > 0
        else:
            sensitive = False
        if sensitive:
            yield _Part(name, module, parents.get(id(module)))


def _is_held(part: _Part, held: set[int]) -> bool:
    """Whether an optimizer with these parameters trains the layer, or what surrounds it."""
    own = list(part.module.parameters()) or (list(part.parent.parameters()) if part.parent is not None else [])
    return not own or any(id(p) in held for p in own)


def _trains(part: _Part) -> bool:
    """Whether the part, or what surrounds it, has anything to train."""
    own = list(part.module.parameters(recurse=True))
    if own:
        return any(p.requires_grad for p in own)
    return part.parent is None or any(p.requires_grad for p in part.parent.parameters())


class EvaluationModeProbe:
    """Counts normalisation layers that updated their running statistics during an evaluation.

    Proof that the very model that is trained ran in train mode: its counters moved, which their version numbers tell
    without a look at their values. Dropout leaves no trace, and a copy that is evaluated instead (an average of the
    weights) none on the original. Layers without momentum are left out: that is how averaged models are given new
    statistics on purpose.
    """

    name = "evaluation-mode"
    listens_to: tuple[EventKind, ...] = (EventKind.EVAL_START, EventKind.EVAL_STEP)
    provides: tuple[Metric, ...] = (
        Metric(
            "modules.train_in_eval",
            "Normalisation layers whose running statistics moved between two batches of an evaluation.",
            cost=Cost.HOST,
            needs=("evaluation",),
        ),
    )

    def __init__(self) -> None:
        self._before: list[tuple[str, Any, int]] | None = None
        self._batches = 0

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None:
            return ()
        if event.kind is EventKind.EVAL_START:
            self._batches = 0
            return ()
        # From the first batch to the second: the end of an evaluation may be noticed only at the next backward pass.
        self._batches += 1
        if self._batches == 1:
            self._before = [(name, weak(module), _version(module)) for name, module in _counting(event.model)]
        if self._batches != 2 or not self._before:
            return ()
        before, self._before = self._before, None
        looked = [(name, module(), version) for name, module, version in before]
        hit = [name for name, module, version in looked if module is not None and _version(module) != version]

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(hit), "modules": f"{len(hit):,} of {len(looked):,} such layers"}

        return (Sample("modules.train_in_eval", event.step, float(len(hit)), phase="eval", detail=facts),)


def _counting(model: Any) -> Iterable[tuple[str, Any]]:
    from torch.nn.modules.batchnorm import _NormBase

    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.num_batches_tracked is not None and module.momentum is not None:
            yield name, module


def _version(module: Any) -> int:
    counter = module.num_batches_tracked
    return int(counter._version) if counter is not None else -1


class EvaluationDropoutProbe:
    """Counts modules that drop values in a forward pass of an evaluation although they are in evaluation mode.

    So does dropout as a function (``F.dropout(x)``, ``dropout_p`` of attention, a mask by hand) that does not ask for
    ``self.training``: two passes of one batch differ, and the model is evaluated with a part of it missing. A dropout
    layer that was put into train mode by itself is left alone: that is how Monte Carlo dropout is made.
    """

    name = "evaluation-dropout"
    listens_to: tuple[EventKind, ...] = (EventKind.EVAL_END,)
    only_with = "dropping"
    provides: tuple[Metric, ...] = (
        Metric(
            "modules.dropping_in_eval",
            "Modules in evaluation mode that dropped values in a forward pass of an evaluation; looked at in the first three.",
            cost=Cost.HOST,
            needs=("evaluation",),
        ),
        Metric(
            "modules.by_batch_in_eval",
            "Modules in evaluation mode whose batch norm took the statistics of the batch; looked at in the first three evaluations.",
            cost=Cost.HOST,
            needs=("evaluation",),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        samples = []
        for key, found in (("modules.dropping_in_eval", event.dropping), ("modules.by_batch_in_eval", event.by_batch)):
            if found is not None:
                detail = partial(_which, found) if found else None
                samples.append(Sample(key, event.step, float(len(found)), phase="eval", detail=detail))
        return samples


def _which(found: Sequence[str]) -> Mapping[str, Any]:
    return {"which": first_few(found)}


PAUSES = 2
"""Pauses after which a loss computed in train mode is taken for an evaluation."""
APART = 5
"""Steps between two of them, on average, at the least: who computes such a loss in each step chooses rows by it."""


class TrainModeLossProbe:
    """Counts layers that behave differently in train mode, where losses are computed without gradients in that mode.

    Such a loss is an estimate, of an evaluation without ``model.eval()``: dropout makes it larger and noisy, batch norm
    mixes the rows. Left alone are losses of rows that are trained on, those of nearly each step (hard examples are chosen
    by them), and runs with a copy of the model in eval mode, which may be what is evaluated.
    """

    name = "train-mode-losses"
    listens_to: tuple[EventKind, ...] = (EventKind.BEFORE_UPDATE,)
    only_when_due = listens_to
    provides: tuple[Metric, ...] = (
        Metric(
            "modules.train_in_loss",
            "Dropout, normalisation and RNN layers in train mode while losses were computed without gradients.",
            cost=Cost.HOST,
            needs=("a loss computed without gradients in train mode",),
        ),
    )

    def __init__(self) -> None:
        self._last = -1
        """Step of the newest pause that was looked at: of a long run only so many are kept."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if event.model is None or event.run is None or event.optimizer_index > 0:
            return ()
        steps = event.run.losses_in_train_mode
        if not steps or steps[-1] == self._last or not demand.due("modules.train_in_loss", event.step):
            return ()
        self._last = steps[-1]
        often = (steps[-1] - steps[0]) < APART * (len(steps) - 1)
        hit: list[str] = []
        place = where_called(event, "loss_in_train_mode")
        if len(steps) >= PAUSES and not often:
            modules = event.model.named_modules()
            hit = [part.name for part in sensitive_parts(modules) if part.module.training]
            if hit and _has_copy_in_eval(modules):
                hit = []

        def facts() -> Mapping[str, Any]:
            return {
                "which": first_few(hit),
                "pauses": f"the last {len(steps)}" if len(steps) == steps.maxlen else f"{len(steps)} so far",
            } | place

        return (Sample("modules.train_in_loss", event.step, float(len(hit)), detail=facts if hit else None),)


def _has_copy_in_eval(modules: Sequence[tuple[str, Any]]) -> bool:
    own = {id(module) for _, module in modules}
    kinds = {type(module) for _, module in modules if any(True for _ in module.children())}
    return any(type(m) in kinds and id(m) not in own and not m.training for m in live_objects("Module"))


LOOKS = 10
"""Looks in a run; a model that is put into eval mode later is the business of ``modules.in_eval``."""


class EvalStartProbe:
    """Looks in its first steps for a model that nobody ever put into train mode.

    ``from_pretrained`` and many loaders hand out a model in eval mode. Counted are dropout layers in a model that is in
    eval mode as a whole, has nothing frozen and is trained by this optimizer, and batch norm layers in eval mode that
    are trained while their running statistics are still the zeros and ones of their beginning: they normalise nothing.
    A backbone that is frozen or has statistics of its own, a layer that was switched by itself (what holds it is in
    train mode), and one that was in train mode when training began or at an earlier look, are left alone.
    """

    name = "eval-start"
    listens_to: tuple[EventKind, ...] = (EventKind.TRAIN_START, EventKind.BEFORE_UPDATE)
    only_when_due = (EventKind.BEFORE_UPDATE,)
    provides: tuple[Metric, ...] = (
        Metric(
            "modules.never_in_train",
            "Dropout and batch norm layers of a trained model that were in eval mode from the start.",
            cost=Cost.HOST,
        ),
    )

    def __init__(self) -> None:
        self.rests_until = 0
        self._looks = 0
        self._in_train: dict[int, Callable[[], Any]] = {}
        """Layers that were in train mode when training began, or at a look."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        begins = event.kind is EventKind.TRAIN_START
        if event.model is None or not (begins or event.optimizer is not None):
            return ()
        if not begins and not demand.due("modules.never_in_train", event.step):
            return ()
        if begins and not _is_under_way(event):
            return ()
        modules = event.model.named_modules()
        parts = list(sensitive_parts(modules))
        for part in parts:
            if part.module.training:
                self._in_train[id(part.module)] = weak(part.module)
        if begins:
            return ()
        self._looks += 1
        if self._looks >= LOOKS:
            self.rests_until = sys.maxsize
        trained = {id(p) for group in event.optimizer.param_groups for p in group["params"] if p.grad is not None}
        never = [part for part in parts if not self._was_in_train(part.module)]
        hit = _in_eval(never, modules, trained) if never else []

        place = where_in_model(event, hit)

        def facts() -> Mapping[str, Any]:
            return {"which": first_few(hit)} | place

        return (Sample("modules.never_in_train", event.step, float(len(hit)), detail=facts if hit else None),)

    def _was_in_train(self, module: Any) -> bool:
        known = self._in_train.get(id(module))
        return known is not None and known() is module


def _in_eval(parts: Iterable[_Part], modules: Sequence[tuple[str, Any]], trained: set[int]) -> list[str]:
    """Names of those of these layers that are in eval mode with what holds them, and are trained."""
    from torch.nn.modules.batchnorm import _NormBase

    parents = {id(child): parent for _, parent in modules for child in parent.children()}
    found = []
    for part in parts:
        if part.module.training or (part.parent is not None and part.parent.training):
            continue
        if isinstance(part.module, _NormBase):
            if part.module.weight is not None and id(part.module.weight) in trained and _is_untouched(part.module):
                found.append(part.name)
            continue
        root = part.module
        # Dropout has nothing to train itself: what counts is the whole model that holds it.
        while id(root) in parents:
            root = parents[id(root)]
        own = list(root.parameters())
        if not root.training and own and all(id(p) in trained for p in own):
            found.append(part.name)
    return found


def _is_untouched(norm: Any) -> bool:
    """Whether its running statistics are those of a new layer. Unknown on a device, where asking would be a wait."""
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None or not on_host(mean):
        return False
    return not bool(mean.any()) and bool((variance == 1).all())
