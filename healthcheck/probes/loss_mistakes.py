"""Mistakes in how a loss is put together that show in the shapes and dimensions of its graph, or in which of its parts
carry gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from healthcheck.core.events import Event, EventKind
from healthcheck.core.protocols import Demand
from healthcheck.core.samples import Cost, Metric, Sample
from healthcheck.device.tensors import is_tensor, on_host
from healthcheck.probes.graph import (
    CROSS_ENTROPIES,
    DISTANCES,
    NEUTRAL,
    REDUCING,
    all_behind,
    dimension,
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

_SOFTMAXES = ("Softmax", "LogSoftmax", "SafeSoftmax")
_CHAIN = 12
"""Nodes between a loss and its softmax that are followed."""
_TERMS = 48
"""Nodes between a loss and the terms that it is made of that are followed."""
_LEAST_ROWS = 3
MASK = 64
"""Values of a mask from which on it is not mistaken for a few weights."""
_BETWEEN = (*REDUCING, *NEUTRAL, "Minimum", "Maximum", "Clamp", "Where", "Stack", "Cat")


def shape_mistakes(root: Any) -> Iterator[str]:
    """What is wrong with the shapes and dimensions behind a loss, in words."""
    for node in near(root):
        kind = kind_of(node)
        if kind in (*CROSS_ENTROPIES, *DISTANCES, "BinaryCrossEntropy"):
            yield from _one_value(node)
        if kind in (*CROSS_ENTROPIES, "BinaryCrossEntropyWithLogits") and _drops_output(node):
            yield "dropout on the output of the model, right before the loss: it belongs between layers"
        if kind in CROSS_ENTROPIES:
            yield from _wrong_classes(node)
            yield from _one_target_of_similarities(node)
            yield from _flat_similarities(node)
        if kind == "LogSoftmax" and (shape := shape_of(node)) and shape[dimension(node, len(shape))] == 1:
            # Under a cross entropy with one probability for each class.
            yield f"a softmax over one value ({shape}) is always 1: for one output use binary_cross_entropy_with_logits"
        elif kind == "Sub":
            yield from _rate_for_logarithm(node)
        elif kind == "Pow" and _of_a_mean(node):
            yield (
                "a focal weight from the mean loss of the batch, one for all rows: take reduction='none', and the mean at the end"
            )


def _one_value(loss: Any) -> Iterator[str]:
    """A softmax over a single value, whose result is always 1."""
    softmax = past_neutral(source_of(loss))
    shape = shape_of(softmax)
    if kind_of(softmax) in _SOFTMAXES and shape and shape[dimension(softmax, len(shape))] == 1:
        yield (
            f"a softmax over one value (dimension {dimension(softmax, len(shape))} of {shape}) is always 1:"
            " for two classes and one output use a sigmoid, binary_cross_entropy_with_logits"
        )


def _drops_output(loss: Any) -> bool:
    """Whether logits were multiplied with a mask of dropout. Reads the mask, on the host."""
    node = past_neutral(source_of(loss))
    if kind_of(node) == "LogSoftmax":
        node = past_neutral(source_of(node))
    if kind_of(node) == "NativeDropout":
        return True
    if kind_of(node) != "Mul" or [parent for parent, _ in node.next_functions].count(None) != 1:
        return False
    mask: Any = saved(node, "other" if node.next_functions[0][0] is not None else "self")
    if not is_tensor(mask) or not on_host(mask) or mask.numel() < MASK or tuple(mask.shape) != shape_of(node):
        return False
    most = mask.max()
    return bool((most > 1) & ((mask == 0) | (mask == most)).all() & (mask == 0).any())


def _wrong_classes(loss: Any) -> Iterator[str]:
    """A softmax over another dimension than that of the classes, or one that a view has mixed with others."""
    node, place = source_of(loss), 1
    classes = 0
    softmax: Any = None
    for _ in range(_CHAIN):
        shape, kind = shape_of(node), kind_of(node)
        if not shape or place >= len(shape):
            return
        classes = classes or shape[place]
        if kind in ("LogSoftmax", "Softmax") and softmax is None:
            softmax = node
            if len(shape) > 2 and dimension(node, len(shape)) != place:
                yield (
                    f"softmax over dimension {dimension(node, len(shape))} of {shape}, whose classes are dimension {place}"
                )
                return
        elif kind in ("View", "UnsafeView", "Reshape"):
            given = tuple(int(n) for n in getattr(node, "_saved_self_sym_sizes", ()))
            if given[: place + 1] == shape[: place + 1]:  # what comes after the classes was arranged in another way
                node = source_of(node)
                continue
            if not given or place != len(shape) - 1:
                return
            if len(shape) == 2 and _mixes(source_of(node), given, classes):
                yield (
                    f"a view of {given} as {shape}: the {classes} classes are dimension 1, and end up mixed with the"
                    " positions; transpose first (movedim(1, -1))"
                )
                return
            if given[-1] != shape[-1]:
                return
            place = len(given) - 1
        elif kind == "Transpose":
            one, other = (signed(int(getattr(node, f"_saved_dim{n}"))) % len(shape) for n in (0, 1))
            place = other if place == one else one if place == other else place
        elif kind == "Permute":
            place = signed(int(node._saved_dims[place])) % len(shape)
        elif kind == "T":
            place = 1 - place
        elif kind not in ("Clone", "ToCopy", "Alias", "Log", "Div", "Mul"):
            return
        node = source_of(node)


def _mixes(made: Any, given: tuple[int, ...], classes: int) -> bool:
    """Whether what a layer puts out as (batch, classes, positions) is read as if classes were its last dimension."""
    if len(given) < 3 or given[1] != classes or given[-1] == classes:
        return False
    positions = 1
    for n in given[2:]:
        positions *= n
    return positions > 1 and (kind_of(past_neutral(made)) == "Convolution" or given[-1] % classes != 0)


def _one_target_of_similarities(loss: Any) -> Iterator[str]:
    """Each row of a batch against each other, and for all of them the same answer. Reads a few targets, on the host."""
    scores = past_neutral(source_of(past_neutral(source_of(loss))))
    for _ in range(3):  # a temperature
        if kind_of(scores) not in ("Div", "Mul"):
            break
        scores = past_neutral(source_of(scores))
    shape, targets = shape_of(scores), saved(loss, "target")
    if kind_of(scores) != "Mm" or len(shape) != 2 or shape[0] != shape[1] or shape[0] < _LEAST_ROWS:
        return
    inputs = [past_neutral(parent) for parent, _ in scores.next_functions]
    if not inputs or any(kind_of(parent) in ("", "AccumulateGrad") for parent in inputs):
        return
    if is_tensor(targets) and on_host(targets) and targets.numel() == shape[0] and bool((targets == targets[0]).all()):
        n = shape[0]
        yield (
            f"{n} x {n} similarities of a batch with the target {int(targets[0])} in every row: each row's own partner"
            " is on the diagonal (torch.arange)"
        )


FLAT = 0.85
"""Part of the loss of guessing that even perfect answers have, from which on similarities are scaled too small."""


def _flat_similarities(loss: Any) -> Iterator[str]:
    """Similarities of unit vectors, times a number so small that a softmax of them is always next to even."""
    softmax = past_neutral(source_of(loss))
    scaled = past_neutral(source_of(softmax))
    if kind_of(softmax) != "LogSoftmax" or kind_of(scaled) not in ("Mul", "Div"):
        return
    inputs = [parent for parent, _ in scaled.next_functions]
    value: Any = saved(scaled, "other")
    products = past_neutral(inputs[0])
    shape = shape_of(softmax)
    if len(inputs) != 2 or inputs[1] is not None or not is_tensor(value) or value.numel() != 1 or not on_host(value):
        return
    if kind_of(products) not in ("Mm", "Bmm") or len(shape) != 2 or shape[1] < _LEAST_ROWS:
        return
    if not all(_of_length_one(past_neutral(given)) for given, _ in products.next_functions):
        return
    scale = abs(float(value)) if kind_of(scaled) == "Mul" else 1 / max(abs(float(value)), 1e-12)
    least = math.log1p((shape[1] - 1) * math.exp(-2 * min(scale, 300.0))) / math.log(shape[1])
    if least >= FLAT:
        yield (
            f"similarities from -{scale:.3g} to {scale:.3g} in a cross entropy over {shape[1]}: even perfect answers have"
            f" {least:.0%} of the loss of guessing; divide by the temperature"
        )


def _of_length_one(node: Any) -> bool:
    """Whether vectors were divided by their lengths."""
    if kind_of(node) != "Div" or len(node.next_functions) != 2:
        return False
    divisor = node.next_functions[1][0]
    for _ in range(4):
        if kind_of(divisor) not in ("Expand", "ClampMin", "Add", *NEUTRAL):
            break
        divisor = source_of(divisor)
    return kind_of(divisor) in ("LinalgVectorNorm", "Norm")


def _rate_for_logarithm(node: Any) -> Iterator[str]:
    """``exp(x) - target * x``, torch's ``poisson_nll_loss``, of an x that an activation keeps above 0 or has exponentiated."""
    first, second = ([parent for parent, _ in node.next_functions] + [None, None])[:2]
    if kind_of(first) != "Exp" or kind_of(second) != "Mul":
        return
    given = source_of(first)
    if not any(parent is given for parent, _ in second.next_functions):
        return
    made = kind_of(past_neutral(given))
    if made in ("Softplus", "Relu", "Exp", "Sigmoid"):
        yield (
            f"poisson_nll_loss of the result of {made.lower()}: by default it takes the logarithm of the rate; leave the"
            " activation out, or pass log_input=False"
        )


def _of_a_mean(power: Any) -> bool:
    """``(1 - exp(-loss)) ** gamma`` of a loss that is one number already, over more than one row."""
    node = source_of(power)
    if shape_of(power) != () or kind_of(node) not in ("Rsub", "Sub", "Add"):
        return False
    exponential = next((given for given, _ in node.next_functions if kind_of(given) == "Exp"), None)
    loss = source_of(source_of(exponential)) if kind_of(source_of(exponential)) == "Neg" else source_of(exponential)
    if kind_of(loss) == "Neg":
        loss = source_of(loss)
    if kind_of(loss) not in (*CROSS_ENTROPIES, "BinaryCrossEntropyWithLogits", "BinaryCrossEntropy"):
        return False
    target: Any = saved(loss, "target")
    return is_tensor(target) and target.numel() > 1


def products_of_each_with_each(root: Any) -> Iterator[str]:
    """A number of each row, (N,), times another one of each row, (N, 1), which is a matrix: each loss with each weight.

    One of both carries no gradients (weights of rows, a mask, advantages), and the matrix is reduced to one number at once.
    """
    for node, kind in made_of(root, _BETWEEN, _TERMS):
        shape = shape_of(node)
        if kind not in ("Mul", "Div") or len(shape) != 2 or shape[0] != shape[1] or shape[0] < _LEAST_ROWS:
            continue
        inputs = [parent for parent, _ in node.next_functions]
        if inputs.count(None) != 1 or len(inputs) != 2 or (kind == "Div" and inputs[0] is None):
            continue
        trained = inputs[0] or inputs[1]
        other: Any = saved(node, "other" if inputs[0] is not None else "self")
        n = shape[0]
        if not is_tensor(other) or kind_of(trained) in ("AccumulateGrad", "Unsqueeze", "Expand"):
            continue
        sizes = (shape_of(trained), tuple(other.shape))
        if sizes in (((n,), (n, 1)), ((n, 1), (n,))):
            verb = "times" if kind == "Mul" else "divided by"
            yield f"{sizes[0]} {verb} {sizes[1]}: each row with each, {n} x {n}; squeeze(1) one of them"
            return


LOOKS = (2, 50, 200, 1000)
"""Backward passes whose graph is looked at."""


class MissingDetachProbe(GraphProbe):
    """Looks for parts of a loss that carry gradients where they have to be cut off.

    Advantages that weigh log probabilities of actions (the value function would be trained by the policy's loss), targets
    of a Q-function, and both sides of a similarity that is all there is in the loss: without a stop-gradient on one of
    them (Chen and He 2021) a constant output is its minimum.
    """

    name = "missing-detach"
    looks_at = LOOKS
    listens_to: tuple[EventKind, ...] = (EventKind.LOSS,)
    only_with = "loss_graph"
    provides: tuple[Metric, ...] = (
        Metric(
            "loss.not_detached",
            "Parts of the loss that carry gradients and must not, at the 2nd and the 50th backward pass and at two later ones.",
            cost=Cost.HOST,
            needs=("the graph of the loss",),
        ),
    )

    def sample(self, event: Event, demand: Demand) -> Iterable[Sample]:
        if not self.due(event):
            return ()
        found = list(gradient_mistakes(event.loss_graph))
        facts = {"which": "; ".join(found)} | where_called(event, "backward")
        detail = (lambda: facts) if found else None
        return (Sample("loss.not_detached", event.step, float(len(found)), detail=detail),)


def gradient_mistakes(root: Any) -> Iterator[str]:
    """What carries gradients and should not, in words: advantages, and both sides of a similarity that is all there is."""
    for node, kind in made_of(root, _BETWEEN, _TERMS):
        if kind == "Mul" and _weight_has_gradients(node):
            yield (
                "log probabilities of actions are weighted by advantages that carry gradients, so that the policy's loss"
                " trains the value function"
            )
            return
        if kind in (*DISTANCES, "Sub") and _target_has_gradients(node):
            yield ("values of chosen actions are compared with targets that carry gradients")
            return
    if _only_pulls(root) and not any("BackwardBackward" in type(node).__name__ for node in all_behind(root)):
        yield (
            "the loss only pulls outputs of the model together, with gradients on both sides: a constant output is its minimum"
        )


def _weight_has_gradients(node: Any) -> bool:
    parents = [parent for parent, _ in node.next_functions]
    if len(parents) != 2 or None in parents:
        return False
    for chosen, weight in (parents, parents[::-1]):
        base = _chosen_from(chosen)
        if base is None or _chosen_from(weight) is not None:
            continue
        shape = shape_of(weight)
        rows = 1
        for n in shape:
            rows *= n
        # The policy's own probabilities weigh their logarithms in an entropy.
        return rows > 1 and not any(other is base for other in all_behind(weight))
    return False


def _target_has_gradients(node: Any) -> bool:
    """Whether one side of a difference is one output per row, picked by an action, and the other has a graph as well."""
    parents = [parent for parent, _ in node.next_functions]
    if len(parents) != 2 or None in parents:
        return False
    picked = [one_per_row(parent) for parent in parents]
    if picked[0] == picked[1]:
        return False
    chosen = parents[picked.index(True)]
    while kind_of(chosen) in NEUTRAL and kind_of(chosen) != "Index":
        chosen = source_of(chosen)
    outputs = past_neutral(source_of(chosen))
    # Beside all outputs of the same pass it is a cross entropy by hand, or a margin.
    return outputs is not None and not any(node is outputs for node in all_behind(parents[picked.index(False)]))


def one_per_row(node: Any) -> bool:
    """Whether a node picks one of the outputs of each row: ``q.gather(1, actions)``, ``q[rows, actions]``."""
    for _ in range(8):
        kind, shape = kind_of(node), shape_of(node)
        if kind == "Gather":
            return bool(shape) and shape[-1] == 1
        if kind == "Index":
            given = tuple(int(n) for n in getattr(node, "_saved_self_sym_sizes", ()))
            return len(given) == 2 and shape == given[:1] and given[1] > 1
        if kind not in NEUTRAL:
            return False
        node = source_of(node)
    return False


def _chosen_from(node: Any) -> Any:
    """What log probabilities of one choice per row were picked from; None if this is no such thing."""
    for _ in range(_CHAIN):
        kind = kind_of(node)
        if kind in ("Gather", "Index"):
            shape = shape_of(node)
            before = past_neutral(source_of(node))
            if kind == "Gather" and (not shape or shape[-1] != 1):
                return None
            if kind_of(before) == "LogSoftmax":
                return before
            if kind_of(before) == "Sub" and any(
                kind_of(past_neutral(parent)) == "Logsumexp" for parent, _ in before.next_functions
            ):
                return before
            return None
        if kind not in (*NEUTRAL, "Exp", "Clamp", "Sub"):
            return None
        node = source_of(node)
    return None


def _only_pulls(root: Any) -> bool:
    """Whether a loss has no other terms than similarities and distances of two outputs, both with gradients, that it
    makes larger and smaller."""
    waiting, seen, pulls = [(root, 1.0)], 0, 0
    while waiting:
        node, sign = waiting.pop()
        seen += 1
        kind = kind_of(node)
        parents = [parent for parent, _ in node.next_functions]
        both = len(parents) == 2 and None not in parents
        if seen > _TERMS:
            return False
        if kind == "Mul" and both:  # a product of two outputs, summed over their dimensions
            if sign > 0 or not _are_outputs(parents):
                return False
            pulls += 1
        elif kind in DISTANCES or kind == "LinalgVectorNorm" or (kind == "Pow" and kind_of(parents[0]) == "Sub"):
            inputs = parents if kind in DISTANCES else [parent for parent, _ in parents[0].next_functions]
            if sign < 0 or len(inputs) != 2 or None in inputs or not _are_outputs(inputs):
                return False
            pulls += 1
        elif kind in ("Mean", "Sum", *NEUTRAL):
            waiting.append((parents[0], sign))
        elif kind == "Add":
            waiting += [(parent, sign) for parent in parents if parent is not None]
        elif kind in ("Neg", "Rsub") or (kind == "Sub" and parents[0] is None):
            waiting += [(parent, -sign) for parent in parents if parent is not None]
        elif kind == "Sub" and parents[1] is None:
            waiting.append((parents[0], sign))
        elif kind in ("Mul", "Div") and parents.count(None) == 1 and (factor := _number(node)):
            waiting += [(parent, sign * factor) for parent in parents if parent is not None]
        else:
            return False
        if any(node is None for node, _ in waiting):
            return False
    return pulls > 0


def _number(node: Any) -> float:
    """1 or -1: the sign of the one number that a term is multiplied with or divided by; 0 for anything else."""
    value: Any = saved(node, "self" if node.next_functions[0][0] is None else "other")
    if not is_tensor(value):
        return 1.0 if value is None else 0.0
    if value.numel() != 1:
        return 0.0
    return -1.0 if on_host(value) and float(value) < 0 else 1.0


def _are_outputs(parents: list[Any]) -> bool:
    """Whether both were made by layers, and are not one and the same, nor a parameter."""
    first, second = (past_neutral(parent) for parent in parents)
    return first is not second and all(kind_of(node) not in ("", "AccumulateGrad") for node in (first, second))
