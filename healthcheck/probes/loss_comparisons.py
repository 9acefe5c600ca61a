"""What a loss compares, and which way: arguments that changed places, vectors that are compared with themselves, an overlap that is
made smaller, an operation without a derivative in the way of every gradient."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.deferred import calculate, number, value_of
from healthcheck.device.tensors import is_tensor, on_host
from healthcheck.probes.graph import (
    CROSS_ENTROPIES,
    NEUTRAL,
    REDUCING,
    all_behind,
    kind_of,
    made_of,
    near,
    past_neutral,
    saved,
    shape_of,
    signed,
    source_of,
)
from healthcheck.probes.labels import where_called
from healthcheck.probes.looks import GraphProbe

LOOKS = (2, 3, 50, 51, 200)
"""Backward passes whose graph is looked at."""
FLAT = ("Round", "Sign", "Floor", "Ceil", "Trunc", "Sgn")
"""Operations whose derivative is 0 wherever they have one."""
LEAST_ROWS = 4
_TO_PRODUCTS = (
    *REDUCING, *NEUTRAL, *CROSS_ENTROPIES, "LogSoftmax", "Softmax", "Exp", "Log", "Logsumexp", "MaskedFill", "Where", "Cat",
    "Stack", "Clamp", "Rsub",
)  # fmt: skip
_SIGNED = ("Mean", "Sum", "Log", *NEUTRAL)

Flag = tuple[Any, str]
"""A 0-dim boolean tensor that says whether something is wrong, and what, in words."""


class LossComparisonProbe(GraphProbe):
    """Looks at what a loss compares with what.

    *With itself*: a cross entropy over similarities of a batch with itself in which each row's own similarity is among the
    candidates and never the answer; two views that are equal to the last bit. *Which way*: an overlap of outputs and a mask (Dice,
    IoU) that is minimised. *Variance for spread*: one exponential is the standard deviation of a
    sample and its variance in the divergence. *Without a derivative*: every way from the loss to a weight leads through ``round()`` or its like.
    Values stay on the device.
    """

    name = "loss-comparisons"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.miscompared",
            "Comparisons in the loss that cannot teach what they should, at a few backward passes.",
            cost=Cost.DEVICE,
            needs=("the graph of the loss",),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
            return ()
        root = event.loss_graph
        ways = (without_derivative, minimised_overlaps, variance_for_spread, penalties_per_value)
        known = [said for way in ways for said in way(root)]
        if known:
            self.rests_until = sys.maxsize  # the loss of the other side has none of it: that says nothing
        flags = [(number(flag.float()), words) for flag, words in compared_with_itself(root)]
        place = where_called(event, "backward")

        def facts() -> Mapping[str, Any]:
            found = [*known, *(words for flag, words in flags if value_of(flag))]
            return {"which": "; ".join(dict.fromkeys(found))} | place

        if not flags:
            return (Sample("loss.miscompared", event.step, float(len(known)), detail=facts if known else None),)
        total = calculate(lambda *of: len(known) + float(sum(of)), *(flag for flag, _ in flags))
        return (Sample("loss.miscompared", event.step, total, detail=facts),)


def arguments_swapped(root: Any) -> Iterator[str]:
    """A binary cross entropy or a cross entropy whose target carries the gradients, and its input none."""
    for node in near(root):
        kind = kind_of(node)
        parents = [parent for parent, _ in node.next_functions]
        if kind in ("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"):
            if len(parents) >= 2 and parents[0] is None and parents[1] is not None:
                yield "binary cross entropy of (targets, predictions): its first argument is the prediction"
        elif kind == "Mul" and len(parents) == 2 and parents.count(None) == 1:
            # Torch's cross entropy with probabilities: log_softmax(input) * target, summed and divided by the rows.
            mark = node.metadata.get("healthcheck") if hasattr(node, "metadata") else None
            given = next(parent for parent in parents if parent is not None)
            if mark and mark[0] == "cross_entropy" and parents[0] is None and kind_of(given) != "LogSoftmax":
                yield "cross_entropy of (targets, predictions): its first argument is the prediction"


def normalised_over_batch(root: Any) -> Iterator[str]:
    """Products of two batches of vectors, each row with each, that were divided by norms over the rows and not over the features."""
    for node, kind in made_of(root, _TO_PRODUCTS, 96):
        shape = shape_of(node)
        if kind != "Mm" or len(shape) != 2 or shape[0] != shape[1] or shape[0] < LEAST_ROWS:
            continue
        sides = [_norm_over(node.next_functions[0][0], 1), _norm_over(node.next_functions[1][0], 0)]
        if any(over is False for over in sides) and True not in sides:
            yield (
                f"vectors normalised over dimension 0, which is the batch, and then compared each with each ({shape[0]} x"
                f" {shape[1]}): the features are dimension 1"
            )
            return


def _norm_over(node: Any, summed: int) -> bool | None:
    """Whether vectors were divided by their norm over the dimension that a product sums over; None where they were not divided.

    :param summed: that dimension, in the factor as it goes into the product.
    """
    for _ in range(6):
        if kind_of(node) in ("T", "Transpose"):
            summed = 1 - summed
        elif kind_of(node) not in ("Clone", "ToCopy", "Alias", "Mul") or len(shape_of(node)) != 2:
            break
        node = source_of(node)
    if kind_of(node) != "Div" or len(node.next_functions) != 2 or len(shape_of(node)) != 2:
        return None
    given, divisor = (parent for parent, _ in node.next_functions)
    for _ in range(4):
        if kind_of(divisor) not in ("Expand", "ClampMin", "Add", "Clone", "Alias"):
            break
        divisor = source_of(divisor)
    if kind_of(divisor) != "LinalgVectorNorm" or kind_of(past_neutral(given)) in ("", "AccumulateGrad"):
        return None
    over = {signed(int(n)) % 2 for n in (divisor._saved_dim or ())}
    return None if len(over) != 1 else over == {summed}


def without_derivative(root: Any) -> Iterator[str]:
    """Whether no weight is reached from the loss but through an operation whose derivative is 0 everywhere."""
    nodes = all_behind(root)
    flat = [node for node in nodes if kind_of(node) in FLAT]
    if not flat:
        return
    blocked = {id(node) for node in flat}
    waiting, seen = [root], {id(root): root}
    while waiting:
        node = waiting.pop()
        if id(node) in blocked:
            continue
        if kind_of(node) == "AccumulateGrad":
            return
        for parent, _ in node.next_functions:
            if parent is not None and id(parent) not in seen:
                seen[id(parent)] = parent
                waiting.append(parent)
    yield f"all gradients pass through {kind_of(flat[-1]).lower()}(), whose derivative is 0: nothing is learnt"


def variance_for_spread(root: Any) -> Iterator[str]:
    """A sample that is drawn with ``exp(x)`` for its standard deviation, and a divergence that has ``exp(x)`` for its variance."""
    terms = near(root)
    # A summand of the divergence. A ratio of probabilities is an exponential, too, and a factor.
    variances = [
        source_of(part)
        for node in terms
        if kind_of(node) in ("Sub", "Add", "Rsub")
        for part, _ in node.next_functions
        if kind_of(part) == "Exp"
    ]
    if not variances:
        return
    for node in all_behind(root):
        parents = [parent for parent, _ in node.next_functions] if kind_of(node) == "Mul" else []
        if any(node is term for term in terms):
            continue
        if parents.count(None) != 1 or len(parents) != 2:
            continue
        spread = parents[0] or parents[1]
        noise: Any = saved(node, "other" if parents[0] is not None else "self")
        if (
            kind_of(spread) != "Exp"
            or not is_tensor(noise)
            or tuple(noise.shape) != shape_of(node)
            or noise.numel() < 2
        ):
            continue
        if any(source_of(spread) is logarithm for logarithm in variances):
            yield "a sample is drawn with the variance for its standard deviation: std = exp(0.5 * logvar)"
            return


def penalties_per_value(root: Any) -> Iterator[str]:
    """A gradient penalty whose norm is over the channels of a picture alone: of each pixel, not of each picture."""
    for node, kind in made_of(root, (*REDUCING, *NEUTRAL, "Rsub")):
        given = source_of(node)
        if kind not in ("LinalgVectorNorm", "Norm") or "BackwardBackward" not in type(past_neutral(given)).__name__:
            continue
        shape = shape_of(given)
        over = node._saved_dim if kind == "LinalgVectorNorm" else None
        dims = {signed(int(n)) % len(shape) for n in over or ()} if shape else set()
        if len(shape) >= 4 and dims == {1}:
            yield f"the norm of a gradient penalty is over dimension 1 alone of {shape}: flatten(1) first"
            return


def minimised_overlaps(root: Any) -> Iterator[str]:
    """Quotients of an overlap with a mask, ``(output * mask).sum() / (...)``, that the loss makes smaller, if the loss has no
    other terms."""
    waiting, found = [(root, 1.0)], 0
    for _ in range(48):
        if not waiting:
            break
        node, sign = waiting.pop()
        kind = kind_of(node)
        parents = [parent for parent, _ in node.next_functions]
        if kind == "Div" and len(parents) == 2 and None not in parents:
            if sign < 0 or not _is_overlap(parents[0], parents[1]):
                return
            found += 1
        elif kind in _SIGNED and parents and parents[0] is not None:
            waiting.append((parents[0], sign))
        elif kind == "Add":
            waiting += [(parent, sign) for parent in parents if parent is not None]
        elif kind == "Neg" or (kind in ("Rsub", "Sub") and parents.count(None) == len(parents) - 1):
            one = next(parent for parent in parents if parent is not None)
            waiting.append((one, sign if kind == "Sub" and parents[0] is not None else -sign))
        elif kind in ("Mul", "Div") and parents.count(None) == len(parents) - 1:
            factor: Any = saved(node, "other" if parents[0] is not None else "self")
            if is_tensor(factor) and (factor.numel() > 1 or not on_host(factor) or float(factor) <= 0):
                return
            waiting.append((next(parent for parent in parents if parent is not None), sign))
        else:
            return
    if found and not waiting:
        yield "an overlap of outputs and mask (Dice, IoU) is minimised: the loss is 1 - overlap"


def _is_overlap(node: Any, under: Any) -> bool:
    """Whether a quotient is ``2 * (output * mask).sum()`` over a sum of both, or ``(output * mask).sum()`` over both less itself.

    The mask is anything of the output's shape that carries no gradients. Other quotients, such as a rate of false alarms, are
    rightly made smaller.
    """
    doubled = False
    for _ in range(8):
        kind = kind_of(node)
        parents = [parent for parent, _ in node.next_functions] if node is not None else []
        graphs = [parent for parent in parents if parent is not None]
        if kind == "Sum":
            inner: Any = past_neutral(graphs[0]) if graphs else None
            factors = [parent for parent, _ in inner.next_functions] if kind_of(inner) == "Mul" else []
            mask: Any = saved(inner, "other" if factors and factors[0] is not None else "self") if factors else None
            if (
                factors.count(None) != 1
                or not is_tensor(mask)
                or tuple(mask.shape) != shape_of(inner)
                or mask.numel() < 2
            ):
                return False
            return doubled or any(
                part is node for part, _ in made_of(under, ("Add", "Sub", "Rsub", "Clamp", "ClampMin"))
            )
        if kind not in ("Mul", "Add", *NEUTRAL) or len(graphs) != 1:
            return False
        if kind == "Mul":
            factor: Any = saved(node, "other" if parents[0] is not None else "self")
            doubled = is_tensor(factor) and factor.numel() == 1 and on_host(factor) and float(factor) == 2
        node = graphs[0]
    return False


def compared_with_itself(root: Any) -> Iterator[Flag]:
    """Similarities of vectors with themselves: as a candidate that is never the answer, or as two views that are one."""
    for node, kind in made_of(root, _TO_PRODUCTS, 96):
        if kind in CROSS_ENTROPIES:
            yield from _own_candidates(node)
        elif kind in ("Mm", "Bmm"):
            yield from _equal_views(node)
        elif kind == "Mul":
            made = [past_neutral(parent) for parent, _ in node.next_functions]
            if len(made) == 2 and None not in made and len(shape_of(node)) >= 2:
                yield from _equal(saved(node, "self"), saved(node, "other"), made)


def _own_candidates(loss: Any) -> Iterator[Flag]:
    softmax = past_neutral(source_of(loss))
    scores: Any = past_neutral(source_of(softmax)) if kind_of(softmax) == "LogSoftmax" else None
    for _ in range(6):  # a temperature, a mask
        if kind_of(scores) not in ("Div", "Mul", "Sub", "Add", "MaskedFill", "Where", *NEUTRAL):
            break
        scores = next((parent for parent, _ in scores.next_functions if parent is not None), None)
    shape, result, target = shape_of(scores), saved(softmax, "result"), saved(loss, "target")
    if kind_of(scores) != "Mm" or len(shape) != 2 or shape[0] != shape[1] or shape[0] < LEAST_ROWS:
        return
    inputs = [past_neutral(parent) for parent, _ in scores.next_functions]
    if len(inputs) != 2 or inputs[0] is None or inputs[0] is not inputs[1] or kind_of(inputs[0]) == "AccumulateGrad":
        return
    if (
        not is_tensor(result)
        or not is_tensor(target)
        or tuple(result.shape) != shape
        or tuple(target.shape) != shape[:1]
    ):
        return
    import torch

    rows = torch.arange(shape[0], device=target.device)
    best = result.detach().amax(1)
    yield (
        (target != rows).all() & (result.detach().diagonal() >= best).float().mean().gt(0.9),
        "a cross entropy over similarities of a batch with itself, in which each row's similarity with itself is the highest and"
        " never the answer: mask the diagonal",
    )


def _equal_views(product: Any) -> Iterator[Flag]:
    parents = [parent for parent, _ in product.next_functions]
    inputs = [past_neutral(parent) for parent in parents]
    one, other = saved(product, "self"), saved(product, "mat2")
    if len(inputs) != 2 or None in inputs or not is_tensor(one) or not is_tensor(other):
        return
    turned = other.transpose(-1, -2)
    if inputs[0] is inputs[1]:  # both halves of one batch, one behind the other
        half = one.shape[-2] // 2
        if kind_of(_past_lengths(inputs[0])) != "Cat" or one.shape[-2] % 2 or one.shape != turned.shape:
            return
        one, turned, inputs = one[..., :half, :], one[..., half:, :], [None, None]
    yield from _equal(one, turned, inputs)


def _past_lengths(node: Any) -> Any:
    """What unit vectors were made of."""
    return past_neutral(source_of(node)) if kind_of(node) == "Div" else node


def _equal(one: Any, other: Any, made: Sequence[Any]) -> Iterator[Flag]:
    if not is_tensor(one) or not is_tensor(other) or one.shape != other.shape or one.shape[-2] < LEAST_ROWS:
        return
    if made[0] is not None and (made[0] is made[1] or "AccumulateGrad" in map(kind_of, made)):
        return
    one, other = one.detach(), other.detach()
    yield (
        (one == other).all() & (one != one.flatten()[0]).any(),
        "two outputs that the loss compares are equal to the last bit: both views of a pair are one and the same",
    )
