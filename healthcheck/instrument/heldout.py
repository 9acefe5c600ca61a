"""Losses that a script computes without gradients between two steps: what its evaluation came to, if it logs nothing.

A function of ``torch.nn.functional`` that has made the training loss, called without gradients in a pause of training on
data that is not trained on: such a call is a part of an evaluation. The calls of a pause are averaged and handed out as
its ``loss``, one for each data set that was drawn from.

Losses are computed without gradients for other reasons as well: to choose the hard rows of a batch, by a teacher, to
check a value function. The difference is that nobody evaluates there: no model was put into evaluation mode and no
batch was drawn for an evaluation, or the rows are those that are trained on.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

from healthcheck.device.tensors import no_grad, on_host
from healthcheck.instrument.places import place_of
from healthcheck.probes.graph import near

LOSS_FUNCTIONS = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
)
"""Of ``torch.nn.functional``; the classes in ``torch.nn`` call them."""

_MARK = "healthcheck"
"""Key in the metadata of a node of the graph: the function that made it. The graph keeps it, and nothing else is kept."""
_LEARNT_AFTER = 50
"""Passes after which a function that has made no loss is not looked for in their graphs any more."""
MARKS = 500
"""Calls that are marked at most."""
_CLASSES = ("cross_entropy", "nll_loss")
"""Functions whose targets may be one class for each row."""
_LOOSE = 16
"""Calls of one pause that are kept at most, to see whether their rows are trained on next."""
_SETS = 8
"""Data sets of one pause that are kept apart at most."""


class _Call(NamedTuple):
    """One call of a loss function in a pause."""

    key: tuple[int, str]
    """Id of the data set (0: unknown), and the function."""
    value: Any
    """Sum of the loss over the rows."""
    rows: float
    target: weakref.ref[Any] | None
    labels: Any
    """How often each class was a label, and what was answered; None where labels are no classes."""


class SetLoss:
    """Losses of one data set and function in one pause."""

    def __init__(self) -> None:
        self.calls = 0
        self.rows = 0.0
        self.total: Any = 0.0
        """Sum over rows: a float, or a 0-dim tensor on the device."""

    def add(self, value: Any, rows: float) -> None:
        self.calls += 1
        self.rows += rows
        self.total = self.total + value


class HeldOutLosses:
    """Collects the losses of a pause. See the head of this file.

    :param evaluating: whether somebody evaluates now, as far as is known: by the model's mode, or by what is drawn.
    :param batch: the tensors of the batch that is trained on.
    :param drawn_from: the data set of that batch, None if unknown.
    :param wanted: whether anybody wants the loss of an evaluation.
    :param wants_labels: whether anybody wants to know how often each class was a label in it.
    :param training: whether all that is trained is in train mode.
    :param in_train_mode: called once for each pause in which losses were computed in that mode, of rows not trained on, with
        the place of the first call.
    """

    def __init__(
        self,
        *,
        evaluating: Callable[[], bool],
        batch: Callable[[], Iterable[Any]],
        drawn_from: Callable[[], Any],
        wanted: Callable[[], bool],
        wants_labels: Callable[[], bool],
        training: Callable[[], bool],
        in_train_mode: Callable[[str], None],
    ) -> None:
        self._evaluating = evaluating
        self._batch = batch
        self._drawn_from = drawn_from
        self._wanted = wanted
        self._wants_labels = wants_labels
        self._training = training
        self._in_train_mode = in_train_mode
        self._loose: list[weakref.ref[Any]] = []
        """Targets of losses computed without gradients in train mode, since the last one with gradients."""
        self._loose_place = ""
        """Where the first of them was called."""
        self._labels: Any = None
        """How often each class was a label in the calls of a pause: a tensor on their device."""
        self.on = False
        """Whether calls are looked at: training has begun, and somebody wants to know."""
        self.learning = True
        """Whether it is still looked which functions make the training loss."""
        self.served: dict[str, tuple[str, float]] = {}
        """Functions that have made the training loss: how they reduce, and how many values they reduce."""
        self.trained_on: weakref.ref[Any] | None = None
        """The targets of the last call with gradients."""
        self.dataset: Any = None
        """What the last batch of an evaluation was drawn from, by weak reference; None: nothing was drawn."""
        self._passes = self._marks = 0
        self._sets: dict[tuple[int, str], SetLoss] = {}
        self._names: dict[int, str] = {}
        self._last: _Call | None = None
        """The last call, which is counted once it is known that its rows are not trained on next."""
        self._early: list[_Call] = []
        """Calls over the batch that was drawn to be trained on. Loops that put the model into evaluation mode only then
        (skorch, Ignite) evaluate on it: where the next batches of the pause come from the same data set, it counts."""

    # -- while training -----------------------------------------------------------------

    def seen(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A loss function that shows its calls."""
        from torch.compiler import is_compiling

        reference, mark, called = weakref.ref, self._mark, self._called

        def loss(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # a compiled region is traced as if nobody watched
                return original(*args, **kwargs)
            result = original(*args, **kwargs)
            if not self.on:
                return result
            try:
                if result.requires_grad:
                    if self._loose:
                        self._settle(args[1] if len(args) > 1 else None)
                    if len(args) > 1:
                        self.trained_on = reference(args[1])
                    if self.learning:
                        mark(name, result, args, kwargs, original)
                else:
                    called(name, result, args, kwargs, original)
            except Exception:  # a tensor of somebody's own kind: then nothing is known of its loss
                return result
            return result

        # TorchScript compiles torch's functions from their source, and looks names up in the globals of what stands in
        # their place: these must be torch's own.
        return FunctionType(loss.__code__, original.__globals__, original.__name__, None, loss.__closure__)

    def _mark(self, name: str, result: Any, args: Any, kwargs: Any, original: Callable[..., Any]) -> None:
        self._marks += 1
        self.learning = self._marks < MARKS  # where steps are left out, few passes are seen
        given = _bound(original, args, kwargs)
        result.grad_fn.metadata[_MARK] = (name, _reduction(given), _rows(name, given))

    def pass_begins(self, tensors: Any) -> None:
        """A backward pass from this loss is about to run: see which functions have made it."""
        if not self._passes:
            self.on = self._wanted()
        self._passes += 1
        for loss in [tensors] if hasattr(tensors, "grad_fn") else tensors:
            if loss.grad_fn is None:
                continue
            for node in near(loss.grad_fn):
                made_by = node.metadata.get(_MARK) if hasattr(node, "metadata") else None
                if made_by is not None:
                    self.served[made_by[0]] = made_by[1:]
        if self._passes >= _LEARNT_AFTER:
            self.learning = False

    # -- in a pause ---------------------------------------------------------------------

    def _called(self, name: str, result: Any, args: Any, kwargs: Any, original: Callable[..., Any]) -> None:
        """A loss was computed without gradients."""
        import torch

        if torch.is_grad_enabled():
            return
        given = _bound(original, args, kwargs)
        target = given.get("target")
        if name in self.served and len(self._loose) < _LOOSE and self._training() and not self._is_trained_on(target):
            if not self._loose:
                self._loose_place = place_of(sys._getframe(1))
            self._loose.append(weakref.ref(target))
        if not self._evaluating():
            return
        rows = _rows(name, given)
        if rows <= 0 or self._is_last_trained_on(target):
            return
        early = self._is_trained_on(target)
        if early and len(self._early) >= _SETS:
            return
        self._count_last()
        with no_grad():
            value = result.detach()
            if value.dim():
                value = value.sum()
            value = float(value) if on_host(value) else value
            if _reduction(given) == "mean":
                value = value * rows
        drawn = self._drawn_from() if early else None if self.dataset is None else self.dataset()
        key = 0 if drawn is None else id(drawn)
        if key not in self._names and len(self._names) < _SETS:
            self._names[key] = _name_of(drawn)
        labels = _label_counts(given) if name in _CLASSES and self._wants_labels() else None
        call = _Call((key, name), value, rows, None if target is None else weakref.ref(target), labels)
        if early:
            self._early.append(call)
        else:
            self._last = call

    def _settle(self, target: Any) -> None:
        """A loss with gradients follows: those without it were of other rows, or of these."""
        loose, self._loose = [ref() for ref in self._loose], []
        if not any(rows is not None and target is not None and _same_memory(rows, target) for rows in loose):
            self._in_train_mode(self._loose_place)

    def _is_trained_on(self, target: Any) -> bool:
        """Whether these are the rows of the last call with gradients, or of the batch that was drawn to be trained on."""
        if target is None:
            return False
        return self._is_last_trained_on(target) or any(_same_memory(tensor, target) for tensor in self._batch())

    def _is_last_trained_on(self, target: Any) -> bool:
        trained = None if self.trained_on is None else self.trained_on()
        return trained is not None and target is not None and _same_memory(trained, target)

    def _count_last(self) -> None:
        if self._last is None:
            return
        call, self._last = self._last, None
        if call.target is None or not self._is_trained_on(call.target()):
            self._count(call)

    def _count(self, call: _Call) -> None:
        self._sets.setdefault(call.key, SetLoss()).add(call.value, call.rows)
        if call.labels is not None:
            same = self._labels is not None and self._labels.shape == call.labels.shape
            self._labels = self._labels + call.labels if same else call.labels

    def take(self) -> list[tuple[str | None, Any, str]]:
        """What the pause came to: data set (None where there is one only), mean loss, and how it was found. Forgets it."""
        self._count_last()
        early, self._early = self._early, []
        known = {key for key, _ in self._sets}
        for call in early:
            target = None if call.target is None else call.target()
            if call.key[0] in known and not self._is_last_trained_on(target):
                self._count(call)
        sets, self._sets = self._sets, {}
        names, self._names = self._names, {}
        self.dataset = None
        found: list[tuple[str | None, Any, str]] = []
        for drawn in dict.fromkeys(key for key, _ in sets):
            made = {name: losses for (key, name), losses in sets.items() if key == drawn}
            # Functions that make the training loss, if any of them was called; a loop that smooths its labels in training
            # evaluates by another one.
            chosen = {name: losses for name, losses in made.items() if name in self.served}
            if not chosen:
                chosen = made if len(made) == 1 else {}
            if not chosen:
                continue
            with no_grad():
                parts = [self._mean(name, losses) for name, losses in chosen.items()]
                loss = sum(parts[1:], parts[0])
            calls = max(losses.calls for losses in chosen.values())
            said = f"mean of {' + '.join(chosen)} over {calls:,} calls without gradients"
            found.append((names.get(drawn) if len(names) > 1 else None, loss, said))
        return found

    def take_labels(self) -> Any:
        """How often each class was a label in the pause, see :attr:`Event.label_counts`. Forgets it."""
        labels, self._labels = self._labels, None
        return labels

    def _mean(self, name: str, losses: SetLoss) -> Any:
        """In the unit of the training loss: of a value, or of a whole batch where training adds up."""
        reduction, rows = self.served.get(name, ("mean", 1.0))
        return losses.total / losses.rows * (rows if reduction == "sum" else 1.0)


def _bound(original: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call by their names."""
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    if "target" not in arguments and "targets" in arguments:
        arguments["target"] = arguments["targets"]
    return arguments


def _reduction(given: Mapping[str, Any]) -> str:
    """How a call reduces its values; the older arguments for it count as ``mean`` unless they say otherwise."""
    if given.get("reduce") is False:
        return "none"
    if given.get("size_average") is False:
        return "sum"
    return str(given.get("reduction", "mean"))


def _rows(name: str, given: Mapping[str, Any]) -> float:
    """How many values are reduced: of ``mean`` the divisor, but for classes that are ignored or weighted."""
    target = given.get("target")
    shaped = target if hasattr(target, "numel") else next((v for v in given.values() if hasattr(v, "numel")), None)
    if shaped is None:
        return 0.0
    rows = float(shaped.numel())
    if name in _CLASSES and getattr(shaped, "is_floating_point", bool)():  # probabilities of each class
        classes = shaped.shape[1] if shaped.dim() > 1 else shaped.shape[0]
        return rows / max(1, int(classes))
    return rows


MOST_CLASSES = 256
"""Classes up to which it is counted what was answered to which label."""


def _label_counts(given: Mapping[str, Any]) -> Any:
    """How often each class is a label of this call: a tensor (classes), or (labels, answers) of few classes, on its device; None
    where labels are no classes."""
    import torch

    answers, target = given.get("input"), given.get("target")
    if answers is None or target is None or target.is_floating_point() or answers.dim() < 2:
        return None
    classes = int(answers.shape[1])
    with no_grad():
        labels = target.flatten()
        counts = ((labels >= 0) & (labels < classes)).float()
        labels = labels.clamp(0, classes - 1)
        if classes > MOST_CLASSES:
            return torch.zeros(classes, device=labels.device).index_add_(0, labels, counts)
        places = labels * classes + answers.argmax(1).flatten()
        return torch.zeros(classes**2, device=labels.device).index_add_(0, places, counts).view(classes, classes)


def _same_memory(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if one.device != other.device or one.numel() == 0:
        return False
    return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())


def _name_of(dataset: Any) -> str:
    """What a script calls its data set or the loader over it, by its global names; else its class."""
    if dataset is None:
        return "unnamed"
    import sys

    for name, thing in list(vars(sys.modules["__main__"]).items()):
        if thing is dataset or getattr(thing, "dataset", None) is dataset:
            return name
    return type(dataset).__name__
