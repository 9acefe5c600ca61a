"""Terms of a loss that are numbers only: they change from batch to batch, and no gradient comes of them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number
from healthcheck.device.tensors import is_tensor, no_grad, on_host
from healthcheck.probes.graph import CROSS_ENTROPIES, kind_of, saved, shape_of, signed, source_of
from healthcheck.probes.labels import where_called
from healthcheck.probes.looks import GraphProbe

LOOKS = (2, 3, 4, 6, 20, 50, 100, 150, 200, 300, 500, 1000)
"""Backward passes whose loss is taken apart."""
FEWEST = 3
"""Passes from which on it is said whether a term changes."""
CHANGE = 1e-3
"""Part of a term by which it must have changed, and of the ratio to the loss."""
OF_LOSS = 1e-4
"""The same, as a part of the loss: less may be rounding."""
SCALE = 1024.0
"""A factor of the whole loss from which on it is the scale of mixed precision, which the loss is given without."""
MOST = 48
"""Nodes of a loss that are followed to its terms."""

Factors = tuple[tuple[Any, bool], ...]
"""Numbers that a term is multiplied with, or divided by (True)."""
_ARRANGING = ("View", "Reshape", "UnsafeView", "Squeeze", "Unsqueeze", "Clone", "Alias", "ToCopy")
_REDUCTIONS = ("none", "mean", "sum")


class ConstantTermProbe(GraphProbe):
    """Takes a loss apart into the terms that carry gradients, in a few passes, and looks at what is left.

    Each term is calculated once more from what torch keeps of it for the backward pass. The loss less all of them is what was
    added as a number: 1 of ``1 - dice``, or an epsilon. Where that differs from batch to batch, it was made of the data, by ``.item()``,
    ``.data``, a threshold, or under ``no_grad()``, and teaches nothing. A loss with a term that torch does not keep is not judged, nor
    are those of optimizers that take turns: in a game the loss of one side may hold the other's part, which it does not train.
    """

    name = "constant-terms"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.gradientless",
            "1 if a part of the loss changes from batch to batch and carries no gradient, else 0.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss", "a sum of terms, of which all that carry gradients are known"),
        ),
    )

    def __init__(self) -> None:
        super().__init__()
        self._left: dict[str, list[tuple[float, float]]] = {}
        """For each form of the loss: what was left of it, and the loss."""
        self._written: dict[int, int] = {}
        """How often the first tensors of each optimizer had been written to, at the last look."""

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event) or not is_tensor(event.loss) or not _exact(event.loss):
            return ()
        if self._take_turns(event):
            return ()
        with no_grad():
            terms = Terms(_without_scale(event.loss_graph))
            if terms.total is None or not terms.numbers:
                return ()
            left = calculate(
                partial(self._changes, terms.form), number(event.loss.detach().float()), number(terms.total)
            )
        place = where_called(event, "backward")
        return (Sample("loss.gradientless", event.step, left, detail=lambda: place),)

    def _take_turns(self, event: Event) -> bool:
        """Whether more than one optimizer has made updates since the last look."""
        before, optimizers = self._written, [] if event.model is None else event.model.optimizers()
        self._written = {id(o): sum(p._version for g in o.param_groups for p in g["params"][:1]) for o in optimizers}
        return bool(before) and sum(before.get(key, 0) != count for key, count in self._written.items()) > 1

    def _changes(self, form: str, loss: float, known: float) -> float:
        seen = self._left.setdefault(form, [])
        seen.append((loss - known, loss))
        if len(seen) < FEWEST:
            return 0.0
        most = max(abs(left) for left, _ in seen)
        apart = max(left for left, _ in seen) - min(left for left, _ in seen)
        if apart <= max(CHANGE * most, OF_LOSS * max(abs(loss) for _, loss in seen)):
            return 0.0
        # The same part of the loss each time is a factor that was not seen.
        ratios = [left / loss for left, loss in seen if loss]
        return float(len(ratios) < FEWEST or max(ratios) - min(ratios) > CHANGE * max(map(abs, ratios)))


def _without_scale(root: Any) -> Any:
    """The node of the loss before it was multiplied with the scale of mixed precision."""
    if kind_of(root) != "Mul" or [parent for parent, _ in root.next_functions].count(None) != 1:
        return root
    at = 1 if root.next_functions[0][0] is None else 0
    factor: Any = saved(root, "self" if at else "other")
    scales = is_tensor(factor) and factor.numel() == 1 and (not on_host(factor) or abs(float(factor)) >= SCALE)
    return root.next_functions[at][0] if scales else root


class Terms:
    """The terms of a loss that carry gradients, added up.

    :ivar total: their sum, a 0-dim tensor; None where one of them is not known.
    :ivar numbers: how many numbers without gradients were added to them.
    :ivar form: operations and factors' places, the same for losses that are made in the same way.
    """

    def __init__(self, root: Any) -> None:
        self.total: Any = None
        self.numbers = 0
        self._kinds: list[str] = []
        total: Any = 0.0
        waiting: list[tuple[Any, Factors]] = [(root, ())]
        while waiting:
            node, factors = waiting.pop()
            self._kinds.append(kind_of(node))
            if len(self._kinds) > MOST:
                return
            parts = self._parts(node, factors)
            if parts is not None:
                waiting += parts
                continue
            value = value_of_term(node)
            if value is None:
                return
            for by, divides in factors:  # on the device, if they are there
                value = value / by if divides else value * by
            total = total + value.reshape(())
        self.total = total if is_tensor(total) else None

    @property
    def form(self) -> str:
        return " ".join(self._kinds)

    def _parts(self, node: Any, factors: Factors) -> list[tuple[Any, Factors]] | None:
        """What a number was made of, each with its factor; None for a term."""
        kind = kind_of(node)
        inputs = [parent for parent, _ in node.next_functions]
        if kind in ("Add", "Sub", "Rsub"):
            if any(
                size not in ((), (1,))
                for size in (shape_of(node), *(shape_of(one) for one in inputs if one is not None))
            ):
                return None
            signs = (-1.0, 1.0) if kind == "Rsub" else (1.0, -1.0 if kind == "Sub" else 1.0)
            alpha = float(getattr(node, "_saved_alpha", 1))
            self.numbers += inputs.count(None) or (len(inputs) == 1)
            weights = (signs[0], signs[1] * alpha)
            return [(one, (*factors, (w, False))) for one, w in zip(inputs, weights, strict=False) if one is not None]
        if kind == "Neg":
            return [(inputs[0], (*factors, (-1.0, False)))]
        if kind in _ARRANGING:
            return [(inputs[0], factors)]
        if kind in ("Mul", "Div") and shape_of(node) in ((), (1,)) and inputs.count(None) == len(inputs) - 1:
            by: Any = saved(node, "other" if inputs[0] is not None else "self")
            if not is_tensor(by) or by.numel() != 1 or (kind == "Div" and inputs[0] is None):
                return None
            return [(next(one for one in inputs if one is not None), (*factors, (by, kind == "Div")))]
        return None


def value_of_term(node: Any) -> Any:
    """What a node of one number came to, calculated from what it keeps: a 0-dim tensor, or None where that is not known."""
    kind = kind_of(node)
    if shape_of(node) not in ((), (1,)):
        return None
    if kind in ("Mean", "Sum") and not hasattr(node, "_saved_dim"):
        values = _values(source_of(node))
        if values is None:
            return None
        return values.mean() if kind == "Mean" else values.sum()
    result: Any = saved(node, "result")
    if is_tensor(result) and result.numel() == 1 and kind in ("LinalgVectorNorm", "Sqrt", "Exp", "Sigmoid", "Softplus"):
        return result.detach().float().reshape(())
    value = _loss_of(node, kind)
    return None if value is None else value.float().reshape(())


def _values(node: Any) -> Any:
    """Values that are reduced to one."""
    kind = kind_of(node)
    given: Any = saved(node, "self")
    if not is_tensor(given) or not _exact(given):
        return None
    if kind == "Pow":
        return given.detach().float().pow(float(node._saved_exponent))
    if kind == "Abs":
        return given.detach().float().abs()
    value = _loss_of(node, kind)
    return None if value is None else value.float()


def _exact(values: Any) -> bool:
    """Whether rounding is no part of the loss that could be taken for a term."""
    return str(values.dtype) in ("torch.float32", "torch.float64")


def _loss_of(node: Any, kind: str) -> Any:
    """One of torch's losses, from its input and target."""
    from torch.nn import functional

    given, target = saved(node, "self"), saved(node, "target")
    if not is_tensor(given) or not is_tensor(target) or not _exact(given):
        return None
    given, target = given.detach(), target.detach()
    reduction = _REDUCTIONS[int(node._saved_reduction)]
    weight = saved(node, "weight")
    if kind in CROSS_ENTROPIES:
        ignored = signed(int(node._saved_ignore_index))
        return functional.nll_loss(given, target, weight, ignore_index=ignored, reduction=reduction)
    if kind == "MseLoss":
        return functional.mse_loss(given, target, reduction=reduction)
    if kind == "L1Loss":
        return functional.l1_loss(given, target, reduction=reduction)
    if kind == "SmoothL1Loss":
        return functional.smooth_l1_loss(given, target, reduction=reduction, beta=float(node._saved_beta))
    if kind == "HuberLoss":
        return functional.huber_loss(given, target, reduction=reduction, delta=float(node._saved_delta))
    if kind == "BinaryCrossEntropy":
        return functional.binary_cross_entropy(given, target, weight, reduction=reduction)
    if kind == "BinaryCrossEntropyWithLogits":
        positives = saved(node, "pos_weight")
        return functional.binary_cross_entropy_with_logits(
            given, target, weight, reduction=reduction, pos_weight=positives
        )
    return None
